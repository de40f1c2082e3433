"""The edits "gloo_hierarchy" (speed): an all-reduce in two levels, within nodes and between them, for Gloo.

The edits have no effect unless HOROVOD_GLOO_ALLREDUCE=hierarchical, which hvd_hetero's `init()` sets. They add the
algorithm to Horovod's source as a new file, `source/gloo_hierarchy.cc`, and call it in place of Gloo's own all-reduce.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hvd_hetero.cli.edits import Edit

_NAME = "gloo_hierarchy"
_SOURCE = Path(__file__).parent / "source"
_PLACE = "horovod/common/gloo"

_NEGOTIATION = """  if (GlooHierarchy* hierarchy = gloo_context_.Hierarchy()) {
    hierarchy->Allreduce(bitvector.data(), count, sizeof(long long), func);
    return;
  }
"""


def _edit(file: str, find: str, replace: str, reason: str, count: int = 1) -> Edit:
    return Edit(name=_NAME, kind="speed", file=file, find=find, replace=replace, reason=reason, count=count)


def _file(name: str) -> Edit:
    return Edit(
        name=_NAME,
        kind="speed",
        file=f"{_PLACE}/{name}",
        creates=True,
        find="",
        replace=(_SOURCE / name).read_text(encoding="utf-8"),
        reason="all-reduces of Gloo are slow with several ranks on a node, and a run does not repeat bit for bit: its "
        "ring over all n ranks takes 2 (n - 1) steps, sends data between ranks of one node through sockets, and sums "
        "in an order that depends on a tensor's place in the buffer. With HOROVOD_GLOO_ALLREDUCE=hierarchical the "
        "ranks of a node sum in shared memory, and nodes exchange the sums",
    )


EDITS: Final = (
    _file("gloo_hierarchy.cc"),
    _file("gloo_hierarchy.h"),
    _edit(
        "CMakeLists.txt",
        '"${PROJECT_SOURCE_DIR}/horovod/common/gloo/gloo_controller.cc"\n',
        f'"${{PROJECT_SOURCE_DIR}}/{_PLACE}/gloo_controller.cc"\n'
        f'                        "${{PROJECT_SOURCE_DIR}}/{_PLACE}/gloo_hierarchy.cc"\n',
        "Part of gloo_hierarchy: adds gloo_hierarchy.cc to the build",
    ),
    _edit(
        f"{_PLACE}/gloo_context.h",
        '#include "../logging.h"\n',
        '#include "../logging.h"\n#include "gloo_hierarchy.h"\n',
        "Part of gloo_hierarchy: includes the header of the two-level all-reduce",
    ),
    _edit(
        f"{_PLACE}/gloo_context.h",
        "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n",
        "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n"
        "  // Made by the first all-reduce of each ctx, also where an elastic job has come to a new one.\n"
        "  std::shared_ptr<GlooHierarchy> hierarchy = nullptr;\n"
        "  std::shared_ptr<gloo::Context> hierarchy_of = nullptr;\n\n"
        "  // Null where it is not asked for, or does not work.\n"
        "  GlooHierarchy* Hierarchy() {\n"
        "    if (!GlooHierarchy::Enabled()) {\n"
        "      return nullptr;\n"
        "    }\n"
        "    if (hierarchy_of != ctx) {\n"
        "      hierarchy = std::make_shared<GlooHierarchy>(ctx);\n"
        "      hierarchy_of = ctx;\n"
        "    }\n"
        "    return hierarchy != nullptr && hierarchy->Usable() ? hierarchy.get() : nullptr;\n"
        "  }\n",
        "Part of gloo_hierarchy: each Gloo context makes its own two-level all-reduce at first use, and a new one "
        "after an elastic job has got a new context",
    ),
    _edit(
        f"{_PLACE}/gloo_context.cc",
        "  global_ctx.reset();\n  ctx.reset();\n",
        "  hierarchy.reset();\n  hierarchy_of.reset();\n  global_ctx.reset();\n  ctx.reset();\n",
        "Part of gloo_hierarchy: releases the two-level all-reduce together with its Gloo context",
    ),
    _edit(
        "horovod/common/ops/gloo_operations.cc",
        "  gloo::allreduce(opts);\n",
        """  GlooHierarchy::CheckVariable();
  GlooHierarchy::Reduce reduce = nullptr;
  if (reduce_op == ReduceOp::SUM) {
    reduce = &::gloo::sum<T>;
  } else if (reduce_op == ReduceOp::MIN) {
    reduce = &::gloo::min<T>;
  } else if (reduce_op == ReduceOp::MAX) {
    reduce = &::gloo::max<T>;
  } else if (reduce_op == ReduceOp::PRODUCT) {
    reduce = &::gloo::product<T>;
  }
  auto* hierarchy = reduce != nullptr ? gloo_context_->Hierarchy() : nullptr;
  if (hierarchy != nullptr) {
    hierarchy->Allreduce(buffer_data, num_elements, sizeof(T), reduce);
    return;
  }
  gloo::allreduce(opts);
""",
        "Part of gloo_hierarchy: all-reduces of tensors use the two levels, where they can be used and the operation "
        "is a sum, minimum, maximum or product",
    ),
    _edit(
        f"{_PLACE}/gloo_controller.cc",
        "  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));\n  gloo::allreduce(opts);\n",
        _NEGOTIATION + "  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));\n  gloo::allreduce(opts);\n",
        "Part of gloo_hierarchy: the negotiation of every cycle sums a few bytes, so that its time is all latency; "
        "two levels take three steps, where Gloo's ring takes 2 (n - 1)",
        count=2,
    ),
)
