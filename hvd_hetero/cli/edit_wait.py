"""The edits "blocking_wait" (speed): `horovod.torch.synchronize` sleeps until its handle is done, and does not spin.

The edits have no effect unless HOROVOD_BLOCKING_WAIT=1, which hvd_hetero sets unless the user has set the variable.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_WAIT = "blocking_wait"

EDITS: Final = (
    Edit(
        name=_WAIT,
        reason="horovod.torch.synchronize spins at 100 % CPU while it waits, and on a rank with few cores takes the "
        "core from Horovod's background thread, which has to do the work. If HOROVOD_BLOCKING_WAIT is 1, which is "
        "read at each wait, it sleeps until its handle is done",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/mpi_ops_v2.cc",
        find="void WaitAndClear(int handle) {\n",
        replace="""void WaitAndClear(int handle) {
  if (GetBoolEnvOrDefault("HOROVOD_BLOCKING_WAIT", false)) {
    py::gil_scoped_release release_python_gil;
    handle_manager.WaitUntilDone(handle);
  }
""",
    ),
    Edit(
        name=_WAIT,
        reason="Part of blocking_wait: includes Horovod's own function that reads a variable of the environment",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/mpi_ops_v2.cc",
        find='#include "../common/ops/collective_operations.h"\n',
        replace='#include "../common/ops/collective_operations.h"\n#include "../common/utils/env_parser.h"\n',
    ),
    Edit(
        name=_WAIT,
        reason="Part of blocking_wait: includes the headers for sleeping in the handle manager, which is where a "
        "handle becomes done",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.h",
        find="#include <atomic>\n",
        replace="#include <atomic>\n#include <condition_variable>\n#include <set>\n",
    ),
    Edit(
        name=_WAIT,
        reason="Part of blocking_wait: declares the method that sleeps until a handle is done",
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
        reason="Part of blocking_wait: records the handles that a thread waits for, and wakes threads only for these, "
        "as each step completes many handles that nobody waits for yet",
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
        reason="Part of blocking_wait: defines the wait; a handle that becomes done wakes the thread that waits for it",
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
        reason="Part of blocking_wait: a reset forgets all handles, and wakes the threads that wait for one, which "
        "would otherwise wait for ever",
        kind="speed",
        needs=("torch",),
        file="horovod/torch/handle_manager.cc",
        find="  results_.clear();\n  last_handle_ = 0;\n",
        replace="  results_.clear();\n  last_handle_ = 0;\n  done_.notify_all();\n",
    ),
)
