"""The edits "released_when_done" (repair): an operation of torch is done only once Horovod has released its tensors.

Otherwise Horovod's background thread may hold the last reference to a tensor. To free it, the thread has to wait for
Python's lock, and begins the next communication late.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_NAME = "released_when_done"

EDITS: Final = (
    Edit(
        name=_NAME,
        reason="communication now and then starts late, and a new process, such as a worker of a DataLoader, may hang "
        "at its start. Upstream marks an operation as done shortly before its background thread releases the "
        "operation's tensors: if the script has dropped them by then, that thread frees them, for which it has to "
        "wait for Python's interpreter lock; a process that is started at that moment may never run "
        "(python/cpython#112275: Python before 3.12, except late releases). The callbacks of an operation now hold "
        "its handle, and it is done when the last of them is gone",
        needs=("torch",),
        file="horovod/torch/handle_manager.h",
        find="class HandleManager {\npublic:\n  int AllocateHandle();\n",
        replace="""class HandleManager;

// The handle of an operation, as its callbacks hold it.
class Handle {
public:
  Handle(HandleManager& manager, int number)
      : operation_(std::make_shared<Operation>(manager, number)) {}

  operator int() const { return operation_->number; }

private:
  friend class HandleManager;

  struct Operation {
    Operation(HandleManager& manager, int number)
        : manager(manager), number(number) {}
    ~Operation();

    HandleManager& manager;
    const int number;
    std::shared_ptr<Status> status;
  };

  std::shared_ptr<Operation> operation_;
};

class HandleManager {
public:
  Handle AllocateHandle();
  // Marks it as done, from when no copy of it is left.
  void MarkDone(const Handle& handle, const Status& status);
""",
    ),
    Edit(
        name=_NAME,
        reason="Part of released_when_done: defines the handle that marks its operation as done when its last copy is "
        "gone",
        needs=("torch",),
        file="horovod/torch/handle_manager.cc",
        find="""int HandleManager::AllocateHandle() {
  int handle = last_handle_.fetch_add(1) + 1;
  std::lock_guard<std::mutex> guard(mutex_);
  results_[handle] = nullptr;
  return handle;
}
""",
        replace="""Handle::Operation::~Operation() {
  if (status != nullptr) {
    manager.MarkDone(number, *status);
  }
}

Handle HandleManager::AllocateHandle() {
  int handle = last_handle_.fetch_add(1) + 1;
  std::lock_guard<std::mutex> guard(mutex_);
  results_[handle] = nullptr;
  return Handle(*this, handle);
}

void HandleManager::MarkDone(const Handle& handle, const Status& status) {
  handle.operation_->status = std::make_shared<Status>(status);
}
""",
    ),
    Edit(
        name=_NAME,
        reason="Part of released_when_done: declares the callback before the tensors. C++ destroys members in reverse "
        "order, so that the callback, which holds the handle, now goes after the tensors",
        needs=("torch",),
        file="horovod/common/common.h",
        find="  // Operation context.\n  std::shared_ptr<OpContext> context;\n  // Input tensor.\n",
        replace="  // A callback to call with the status.\n  StatusCallback callback;\n"
        "  // Operation context.\n  std::shared_ptr<OpContext> context;\n  // Input tensor.\n",
    ),
    Edit(
        name=_NAME,
        reason="Part of released_when_done: removes the declaration of the callback from its old place",
        needs=("torch",),
        file="horovod/common/common.h",
        find="  // GPU to do reduction on, or CPU_DEVICE_ID in case of CPU.\n  int device = CPU_DEVICE_ID;\n"
        "  // A callback to call with the status.\n  StatusCallback callback;\n",
        replace="  // GPU to do reduction on, or CPU_DEVICE_ID in case of CPU.\n  int device = CPU_DEVICE_ID;\n",
    ),
    Edit(
        name=_NAME,
        reason="Part of released_when_done: an all-reduce holds tensor objects of its own, which share the memory of "
        "the script's and are unknown to Python, so that Horovod's background thread can release them without "
        "Python's interpreter lock, also while the script starts a process",
        needs=("torch",),
        file="horovod/torch/mpi_ops_v2.cc",
        find="""int DoAllreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,
                const std::string& name, int reduce_op_int,
                double prescale_factor, double postscale_factor,
                int process_set_id) {
  ThrowIfError(common::CheckInitialized());
""",
        replace="""int DoAllreduce(::torch::Tensor tensor, ::torch::Tensor output, int divisor,
                const std::string& name, int reduce_op_int,
                double prescale_factor, double postscale_factor,
                int process_set_id) {
  ThrowIfError(common::CheckInitialized());

  tensor = tensor.detach();
  output = output.detach();
""",
    ),
)
