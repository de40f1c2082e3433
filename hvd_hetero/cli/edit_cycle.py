"""The edits "event_driven_cycle" (speed): Horovod's background thread wakes when a tensor is enqueued.

The edits have no effect unless HOROVOD_EVENT_DRIVEN_CYCLE=1, which hvd_hetero's `init()` sets (not under MPI).

In each cycle, the background threads of all ranks negotiate which tensors are ready on all of them, and reduce these.
Without the edits, a thread sleeps from one cycle to the next, for HOROVOD_CYCLE_TIME: a short cycle costs every rank
CPU time, a long one latency. With them, a rank with tensors enters the negotiation at once and waits there for the
others without using the CPU, and a rank without tensors sleeps until it has some, or until the cycle time is over. So
the cycle time can be long at no cost in latency. HOROVOD_EVENT_DRIVEN_MIN_CYCLE_TIME (ms, default 0) is the least time
between two cycles; above 0, tensors that are enqueued one after the other are reduced together.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_NAME = "event_driven_cycle"

_DECLARATION = """class TensorQueue {
public:
  TensorQueue() = default;
"""

_SIGNAL_HEADER = """// Wakes the background thread when there is something to negotiate. One for
// all process sets, as there is one background thread.
class CycleSignal {
public:
  // Whether HOROVOD_EVENT_DRIVEN_CYCLE=1 was set when first asked.
  static bool Enabled();

  // Ends the present or, if there is none, the next wait.
  static void Notify();

  // Returns when notified since the last return, when stop is set, or at the
  // deadline. For the background thread alone.
  static void WaitUntil(std::chrono::steady_clock::time_point deadline,
                        const std::atomic_bool& stop);
};

"""

_SIGNAL_SOURCE = """namespace {

struct CycleState {
  std::mutex mutex;
  std::condition_variable condition;
  uint64_t epoch = 0;
  uint64_t seen = 0;
};

CycleState& GetCycleState() {
  // Never destroyed: the background thread may wait while the process ends.
  static auto* state = new CycleState();
  return *state;
}

} // namespace

bool CycleSignal::Enabled() {
  static const bool enabled =
      GetBoolEnvOrDefault("HOROVOD_EVENT_DRIVEN_CYCLE", false);
  return enabled;
}

void CycleSignal::Notify() {
  if (!Enabled()) {
    return;
  }
  auto& state = GetCycleState();
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    ++state.epoch;
  }
  state.condition.notify_one();
}

void CycleSignal::WaitUntil(std::chrono::steady_clock::time_point deadline,
                            const std::atomic_bool& stop) {
  auto& state = GetCycleState();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.condition.wait_until(lock, deadline, [&] {
    return state.epoch != state.seen || stop.load();
  });
  state.seen = state.epoch;
}

"""

_SLEEP = """  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
  state.last_cycle_start = std::chrono::steady_clock::now();
"""

_WAIT = """  if (CycleSignal::Enabled()) {
    // A rank whose tensors are not complete must be in the negotiation soon,
    // for the others wait there for it; one without any may sleep.
    bool pending = false;
    for (auto id : state.process_set_table.Ids()) {
      auto& process_set = state.process_set_table.Get(id);
      pending = pending || (process_set.initialization_done &&
                            process_set.IsCurrentProcessIncluded() &&
                            process_set.tensor_queue.HasPending());
    }
    auto cycle_time = std::chrono::microseconds(
        long(state.parameter_manager.CycleTimeMs() * 1000.));
    auto pending_time = std::chrono::microseconds(1000);
    // The shortest distance of two cycles: lets tensors that are enqueued one
    // after the other travel together.
    static const auto shortest_time = std::chrono::microseconds(long(
        1000. *
        GetDoubleEnvOrDefault("HOROVOD_EVENT_DRIVEN_MIN_CYCLE_TIME", 0.)));
    if (!state.shut_down) {
      std::this_thread::sleep_until(state.last_cycle_start +
                                    std::min(shortest_time, cycle_time));
    }
    CycleSignal::WaitUntil(
        state.last_cycle_start +
            (pending ? std::min(pending_time, cycle_time) : cycle_time),
        state.shut_down);
  } else if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
  state.last_cycle_start = std::chrono::steady_clock::now();
"""


def _edit(file: str, find: str, replace: str, reason: str) -> Edit:
    return Edit(name=_NAME, kind="speed", file=file, find=find, replace=replace, reason=reason)


EDITS: Final = (
    _edit(
        "horovod/common/operations.cc",
        _SLEEP,
        _WAIT,
        "the background thread sleeps from one cycle to the next, for HOROVOD_CYCLE_TIME, even if tensors are "
        "waiting: a short cycle costs CPU time on every rank, a long one adds latency to every all-reduce. With "
        "HOROVOD_EVENT_DRIVEN_CYCLE=1 it wakes when a tensor is enqueued",
    ),
    _edit(
        "horovod/common/tensor_queue.h",
        _DECLARATION,
        _SIGNAL_HEADER + _DECLARATION,
        "Part of event_driven_cycle: declares the signal that wakes the thread beside the tensor queue, into which "
        "all frameworks enqueue",
    ),
    _edit(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n",
        "#include <atomic>\n#include <chrono>\n#include <iostream>\n",
        "Part of event_driven_cycle: includes the headers for the declaration of the signal",
    ),
    _edit(
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n",
        """  void RemoveJoinTensor();

  // Whether a tensor was enqueued and not yet given to an operation.
  bool HasPending() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return !tensor_table_.empty();
  }
""",
        "Part of event_driven_cycle: tells whether tensors of this rank are pending: then it negotiates again soon, "
        "as other ranks wait for it there, and otherwise it may sleep",
    ),
    _edit(
        "horovod/common/tensor_queue.cc",
        "// Add a TensorTableEntry as well as its message to the queue.\n",
        _SIGNAL_SOURCE + "// Add a TensorTableEntry as well as its message to the queue.\n",
        "Part of event_driven_cycle: defines the signal that wakes the background thread",
    ),
    _edit(
        "horovod/common/tensor_queue.cc",
        '#include "logging.h"\n',
        '#include <condition_variable>\n\n#include "logging.h"\n#include "utils/env_parser.h"\n',
        "Part of event_driven_cycle: includes the headers for the definition of the signal",
    ),
    _edit(
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n  CycleSignal::Notify();\n  return Status::OK();\n",
        "Part of event_driven_cycle: a tensor that is enqueued wakes the background thread",
    ),
    _edit(
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  CycleSignal::Notify();\n  return Status::OK();\n",
        "Part of event_driven_cycle: a group of tensors that is enqueued wakes the background thread once",
    ),
    _edit(
        "horovod/common/operations.cc",
        "    horovod_global.timeline.Shutdown();\n    horovod_global.shut_down = true;\n",
        "    horovod_global.timeline.Shutdown();\n    horovod_global.shut_down = true;\n    CycleSignal::Notify();\n",
        "Part of event_driven_cycle: hvd.shutdown() wakes the background thread, so as not to wait for the end of its "
        "cycle",
    ),
    _edit(
        "horovod/common/operations.cc",
        "    if (process_set->initialization_done) {\n      return id;\n",
        "    CycleSignal::Notify();\n    if (process_set->initialization_done) {\n      return id;\n",
        "Part of event_driven_cycle: adding a process set takes several cycles; the thread that waits for it wakes "
        "the background thread for each, so as not to wait out their cycle time",
    ),
    _edit(
        "horovod/common/operations.cc",
        "    if (horovod_global.process_set_table.ProcessSetHasJustBeenRemoved()) {\n",
        "    CycleSignal::Notify();\n    if (horovod_global.process_set_table.ProcessSetHasJustBeenRemoved()) {\n",
        "Part of event_driven_cycle: the thread that waits for the removal of a process set wakes the background "
        "thread for each of its cycles",
    ),
)
