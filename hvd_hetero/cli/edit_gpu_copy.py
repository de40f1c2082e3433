"""The edits "copy_beside_backward" (repair): results come back to a GPU while its backward pass still computes.

Without NCCL, the gradients of a GPU are summed in host memory. Horovod copies the sums back on the CUDA stream of the
script, after all that is queued there; these edits copy them on a stream of their own.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_NAME = "copy_beside_backward"
_FILE = "horovod/torch/mpi_ops_v2.cc"
# A failed operation has not waited for what the script had queued, which may still use `output`: nothing is copied.
_COPY = """        if (status.ok()) {{
          CopyToDevice(output, cpu_buffer, {divisor}, device);
        }}
"""


def _edit(*, reason: str, find: str, replace: str) -> Edit:
    return Edit(name=_NAME, needs=("torch",), file=_FILE, reason=reason, find=find, replace=replace)


EDITS: Final = (
    _edit(
        reason="without NCCL, gradients are not communicated while a GPU computes its backward pass: the background "
        "thread copies each result to the GPU on the script's own CUDA stream, behind all that is queued there, which "
        "is the rest of the backward pass, and waits for that before it begins another operation. The copy now has a "
        "stream of its own. That is safe: the memory that it writes to was there before the operation was enqueued, "
        "and the operation has waited for all that was queued then",
        find="void DivideInPlace(::torch::Tensor& tensor, int divisor) {\n",
        replace="""void DivideInPlace(::torch::Tensor& tensor, int divisor);

#if HAVE_GPU
// For the background thread alone.
c10::cuda::CUDAStream StreamAside(int device) {
  static std::map<int, c10::cuda::CUDAStream> streams;
  auto found = streams.find(device);
  if (found == streams.end()) {
    found = streams
                .emplace(device, c10::cuda::getStreamFromPool(
                                     /*isHighPriority=*/true, device))
                .first;
  }
  return found->second;
}
#endif

// Returns when the result of an operation in host memory is where it was asked for.
void CopyToDevice(::torch::Tensor& output, const ::torch::Tensor& result,
                  int divisor, int device) {
  with_device device_guard(device);
#if HAVE_GPU
  auto aside = StreamAside(device);
  c10::cuda::CUDAStreamGuard stream_guard(aside);
#endif
  output.copy_(result);
  if (divisor > 1) {
    DivideInPlace(output, divisor);
  }
#if HAVE_GPU
  aside.synchronize();
#endif
}

void DivideInPlace(::torch::Tensor& tensor, int divisor) {
""",
    ),
    _edit(
        reason="Part of copy_beside_backward: includes the header of the guard that makes a CUDA stream the current "
        "one",
        find="#include <c10/cuda/CUDAException.h>\n",
        replace="#include <c10/cuda/CUDAException.h>\n#include <c10/cuda/CUDAGuard.h>\n#include <map>\n",
    ),
    _edit(
        reason="Part of copy_beside_backward: copies the result of an all-reduce on the stream of its own",
        find="""        with_device device_guard(device);
        output.copy_(cpu_buffer);
        if (divisor > 1) {
          DivideInPlace(output, divisor);
        }
""",
        replace=_COPY.format(divisor="divisor"),
    ),
    _edit(
        reason="Part of copy_beside_backward: copies the results of a grouped all-reduce on the stream of its own, "
        "and divides them after the copy: upstream divides the output before the result is copied into it, so that "
        "the division is lost",
        find="""        // Will execute in the `device` context.
        if (divisor > 1) {
          DivideInPlace(output, divisor);
        }
        with_device device_guard(device);
        output.copy_(cpu_buffer);
""",
        replace=_COPY.format(divisor="divisor"),
    ),
    _edit(
        reason="Part of copy_beside_backward: copies the result of a broadcast on the stream of its own",
        find="""        with_device device_guard(device);
        output.copy_(cpu_buffer);
        handle_manager.MarkDone(handle, status);
""",
        replace=_COPY.format(divisor="/*divisor=*/1") + "        handle_manager.MarkDone(handle, status);\n",
    ),
)
