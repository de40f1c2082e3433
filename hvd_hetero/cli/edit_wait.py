"""Two speed edits, each off until its variable is set: a wait that sleeps, and the choice of Gloo's all-reduce."""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_WAIT = "blocking_wait"
_ALGORITHM = "gloo_allreduce_algorithm"

EDITS: Final = (
    Edit(
        name=_WAIT,
        reason="synchronize spins while it waits, and on a slow rank steals the core from Horovod's own thread; with "
        "HOROVOD_BLOCKING_WAIT=1 it sleeps until its handle is done",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/mpi_ops_v2.cc",
        find="void WaitAndClear(int handle) {\n",
        replace="""void WaitAndClear(int handle) {
  static const bool blocking =
      GetBoolEnvOrDefault("HOROVOD_BLOCKING_WAIT", false);
  if (blocking) {
    py::gil_scoped_release release_python_gil;
    handle_manager.WaitUntilDone(handle);
  }
""",
    ),
    Edit(
        name=_WAIT,
        reason="the variable is read with Horovod's own reader",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/mpi_ops_v2.cc",
        find='#include "../common/ops/collective_operations.h"\n',
        replace='#include "../common/ops/collective_operations.h"\n#include "../common/utils/env_parser.h"\n',
    ),
    Edit(
        name=_WAIT,
        reason="the handle manager is where a handle becomes done",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.h",
        find="#include <atomic>\n",
        replace="#include <atomic>\n#include <condition_variable>\n#include <set>\n",
    ),
    Edit(
        name=_WAIT,
        reason="declares the wait",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.h",
        find="  bool PollHandle(int handle);\n",
        replace="""  bool PollHandle(int handle);
  // Returns when the handle is done or not known (any more).
  void WaitUntilDone(int handle);
""",
    ),
    Edit(
        name=_WAIT,
        reason="only a handle that is waited for wakes anybody: a step completes many that nobody waits for yet",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.h",
        find="  std::mutex mutex_;\n",
        replace="""  std::mutex mutex_;
  std::condition_variable done_;
  std::multiset<int> awaited_;
""",
    ),
    Edit(
        name=_WAIT,
        reason="a handle that is done wakes who waits for it",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.cc",
        find="  results_[handle] = std::make_shared<Status>(status);\n}\n",
        replace="""  results_[handle] = std::make_shared<Status>(status);
  if (awaited_.count(handle) > 0) {
    done_.notify_all();
  }
}

void HandleManager::WaitUntilDone(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto mine = awaited_.insert(handle);
  done_.wait(lock, [&] {
    auto result = results_.find(handle);
    return result == results_.end() || result->second != nullptr;
  });
  awaited_.erase(mine);
}
""",
    ),
    Edit(
        name=_WAIT,
        reason="a reset forgets all handles: who waits for one must not wait for ever",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.cc",
        find="  results_.clear();\n  last_handle_ = 0;\n",
        replace="  results_.clear();\n  last_handle_ = 0;\n  done_.notify_all();\n",
    ),
    Edit(
        name=_ALGORITHM,
        reason="Gloo always runs its ring, whose steps grow with the ranks; HOROVOD_GLOO_ALLREDUCE=bcube halves and "
        "doubles instead (measured no faster on one host of two cores: try it)",
        kind="speed",
        file="horovod/common/ops/gloo_operations.cc",
        find="""template <typename T>
GlooAlgorithms<T>::GlooAlgorithms(GlooContext* gloo_context)
""",
        replace="""namespace {

gloo::AllreduceOptions::Algorithm AllreduceAlgorithmFromEnv() {
  auto value = std::getenv("HOROVOD_GLOO_ALLREDUCE");
  std::string name = value != nullptr ? value : "";
  if (name.empty()) {
    return gloo::AllreduceOptions::Algorithm::UNSPECIFIED;
  }
  if (name == "ring") {
    return gloo::AllreduceOptions::Algorithm::RING;
  }
  if (name == "bcube") {
    return gloo::AllreduceOptions::Algorithm::BCUBE;
  }
  throw std::invalid_argument(
      "HOROVOD_GLOO_ALLREDUCE must be ring or bcube. Received: " + name);
}

} // namespace

template <typename T>
GlooAlgorithms<T>::GlooAlgorithms(GlooContext* gloo_context)
""",
    ),
    Edit(
        name=_ALGORITHM,
        reason="the choice is made once, for all tensors",
        kind="speed",
        file="horovod/common/ops/gloo_operations.cc",
        find="  gloo::allreduce(opts);\n",
        replace="""  static const auto algorithm = AllreduceAlgorithmFromEnv();
  opts.setAlgorithm(algorithm);
  gloo::allreduce(opts);
""",
    ),
    Edit(
        name=_ALGORITHM,
        reason="the negotiation of every cycle, a few bytes, is all latency: it gains most from fewer steps",
        kind="speed",
        file="horovod/common/gloo/gloo_controller.cc",
        find="  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));\n  gloo::allreduce(opts);\n",
        replace="""  opts.setReduceFunction(gloo::AllreduceOptions::Func(func));
  static const bool bcube =
      std::string("bcube") == (std::getenv("HOROVOD_GLOO_ALLREDUCE") != nullptr
                                   ? std::getenv("HOROVOD_GLOO_ALLREDUCE")
                                   : "");
  if (bcube) {
    opts.setAlgorithm(gloo::AllreduceOptions::Algorithm::BCUBE);
  }
  gloo::allreduce(opts);
""",
        count=2,
    ),
)
