"""The edits "fusion_limit" (speed): Horovod fuses tensors only up to HOROVOD_FUSION_LIMIT bytes.

The edits have no effect unless that variable is set, which hvd_hetero's `init()` does (not with NCCL).

Without the edits, Horovod fuses all tensors that are ready in a cycle into one operation, up to 128 MiB. That saves
operations, each of which has a latency, and costs two copies of every tensor. It also makes tensors wait for one
another: the gradients of a whole backward pass are enqueued before a GPU has computed the first of them, so that their
one operation cannot begin before the last is computed.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_NAME = "fusion_limit"
_CONTROLLER = "horovod/common/controller.cc"


def _edit(file: str, find: str, replace: str, reason: str) -> Edit:
    return Edit(name=_NAME, kind="speed", file=file, find=find, replace=replace, reason=reason)


EDITS: Final = (
    _edit(
        "horovod/common/global_state.h",
        "  bool disable_group_fusion = false;\n",
        """  bool disable_group_fusion = false;

  // Bytes that tensors may have together to travel as one, where that is less
  // than the threshold, which is the size of the fusion buffer as well. 0: as
  // many.
  int64_t fusion_limit = 0;
""",
        "Horovod fuses all tensors that are ready, up to HOROVOD_FUSION_THRESHOLD (128 MiB): on a GPU, none of the "
        "gradients is sent before the last is computed. HOROVOD_FUSION_LIMIT limits the fusion alone; a lower "
        "threshold would also make the fusion buffer smaller, which limits the size of a single tensor in some "
        "operations, such as a scaled reduce-scatter",
    ),
    _edit(
        "horovod/common/operations.cc",
        "  // Check if group fusion should be disabled\n",
        """  // As this process found it first: ranks that come together again have to
  // fuse alike, and one that joins finds what the others did.
  static const int64_t fusion_limit = [] {
    const char* text = std::getenv("HOROVOD_FUSION_LIMIT");
    return text != nullptr ? std::strtoll(text, nullptr, 10) : 0ll;
  }();
  state.fusion_limit = fusion_limit;

  // Check if group fusion should be disabled
""",
        "Part of fusion_limit: reads HOROVOD_FUSION_LIMIT where Horovod reads its other variables, and once in a "
        "process, as all ranks of an elastic job have to fuse alike",
    ),
    _edit(
        _CONTROLLER,
        "  // Avoid re-allocating these vectors inside loop\n  std::vector<int64_t> allgather_tensor_byte_sizes;\n",
        """  const int64_t threshold = TensorFusionThresholdBytes();
  const bool limited = state.fusion_limit > 0 && state.fusion_limit < threshold;
  const int64_t most = limited ? state.fusion_limit : threshold;

  // Avoid re-allocating these vectors inside loop
  std::vector<int64_t> allgather_tensor_byte_sizes;
""",
        "Part of fusion_limit: computes the most bytes that may be fused, from the limit and the threshold",
    ),
    _edit(
        _CONTROLLER,
        "            tensor_size + new_tensor_size <= TensorFusionThresholdBytes() &&\n",
        "            tensor_size + new_tensor_size <= most &&\n",
        "Part of fusion_limit: applies the limit when a tensor is added to a fused all-reduce",
    ),
    _edit(
        _CONTROLLER,
        "          if (tensor_size + skipped_size <= TensorFusionThresholdBytes()) {\n",
        "          if (tensor_size + skipped_size <= most) {\n",
        "Part of fusion_limit: applies the limit when the search for tensors to fuse passes over one that does not "
        "fit into the all-reduce",
    ),
    _edit(
        _CONTROLLER,
        "                rankwise_padding_bytes) <= TensorFusionThresholdBytes()) {\n",
        "                rankwise_padding_bytes) <= most) {\n",
        "Part of fusion_limit: applies the limit when a tensor is added to a fused all-gather",
    ),
    _edit(
        _CONTROLLER,
        "          if (total_byte_size_of_output + skipped_size <=\n              TensorFusionThresholdBytes()) {\n",
        "          if (total_byte_size_of_output + skipped_size <= most) {\n",
        "Part of fusion_limit: applies the limit when the search for tensors to fuse passes over one that does not "
        "fit into the all-gather",
    ),
)
