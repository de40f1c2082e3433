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
        reason="an operation is done some moments before the background thread lets go of its tensors. What a script "
        "has dropped by then ends on that thread, which has to become one of Python's for it and waits for the "
        "interpreter's lock: it then communicates late. Where the script starts a process at that moment – the "
        "workers of a DataLoader –, the new process may never begin (python/cpython#112275: Python before 3.12, but "
        "for late releases). The callbacks of an operation hold its handle, and it is done when the last is gone",
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
        reason="its definition",
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
        reason="members end in reverse order: the callback after the tensors",
        needs=("torch",),
        file="horovod/common/common.h",
        find="  // Operation context.\n  std::shared_ptr<OpContext> context;\n  // Input tensor.\n",
        replace="  // A callback to call with the status.\n  StatusCallback callback;\n"
        "  // Operation context.\n  std::shared_ptr<OpContext> context;\n  // Input tensor.\n",
    ),
    Edit(
        name=_NAME,
        reason="where it was",
        needs=("torch",),
        file="horovod/common/common.h",
        find="  // GPU to do reduction on, or CPU_DEVICE_ID in case of CPU.\n  int device = CPU_DEVICE_ID;\n"
        "  // A callback to call with the status.\n  StatusCallback callback;\n",
        replace="  // GPU to do reduction on, or CPU_DEVICE_ID in case of CPU.\n  int device = CPU_DEVICE_ID;\n",
    ),
    Edit(
        name=_NAME,
        reason="an all-reduce holds tensors of its own in the same memory, of which Python does not know: Horovod's "
        "thread need not take the interpreter's lock to let go of them, also where a script starts a process meanwhile",
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
