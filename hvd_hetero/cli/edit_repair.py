"""Repairs of Horovod 0.28.1 that concern all jobs, and not elastic ones or the launcher alone.

They are always in effect, since none changes what a correct run computes.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit
from hvd_hetero.engine.build import BUILD_RECORD

EDITS: Final = (
    Edit(
        name="process_set_interface",
        reason="process sets, the global one included, ignore --network-interfaces and listen on the address that the "
        "host name resolves to, because the interface name of their Gloo context is never assigned. Where that is "
        "127.0.1.1, as on Debian, jobs on several hosts die with 'connect [127.0.0.1]: Connection refused'",
        file="horovod/common/gloo/gloo_context.cc",
        find="""  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
        replace="""  gloo_iface_ = global_context.gloo_iface_;
  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
    ),
    Edit(
        name="stall_inspector",
        reason="under Gloo the stall inspector never warns, however long a rank is missing: its list of ranks has "
        "memory reserved but keeps size 0, so that it looks at no rank",
        file="horovod/common/gloo/gloo_controller.cc",
        find="  global_ranks_.reserve(size_);",
        replace="  global_ranks_.resize(size_);",
    ),
    Edit(
        name="allgather_with_joined",
        reason="an all-gather while other ranks have joined (hvd.join) overwrites the heap, and ranks abort: sizes "
        "are written at the index of each rank, into a list that has one place for each request, and joined ranks "
        "send no request",
        file="horovod/common/controller.cc",
        find="    tensor_sizes.resize(requests.size());",
        replace="    tensor_sizes.resize(size_);",
    ),
    Edit(
        name="vectorised_half",
        reason="sums of fp16 under Gloo are slow, and Compression.fp16 is slower than no compression: Gloo's "
        "vectorised sums of fp16, which are 4 to 6 times faster, are not switched on in the build",
        needs=("f16c",),
        file="CMakeLists.txt",
        find="    add_subdirectory(third_party/gloo)\n",
        replace="    set(USE_AVX 1)\n    add_definitions(-DGLOO_USE_AVX=1)\n    add_subdirectory(third_party/gloo)\n",
    ),
    Edit(
        name="vectorised_half",
        reason="Part of vectorised_half: adds the file with the vectorised sums to Gloo's sources",
        needs=("f16c",),
        file="third_party/gloo/gloo/CMakeLists.txt",
        find='  "${CMAKE_CURRENT_SOURCE_DIR}/gatherv.cc"\n',
        replace='  "${CMAKE_CURRENT_SOURCE_DIR}/gatherv.cc"\n  "${CMAKE_CURRENT_SOURCE_DIR}/math.cc"\n',
    ),
    Edit(
        name="half_assignment",
        reason="some sums of fp16 under Gloo are wrong: 14744 + 14744 stays 14744. Gloo assigns an fp16 only if it "
        "differs from the old one, but compares it with the bit pattern of the old one, read as a number. For every "
        "value there is one (large) sum at which a rank's contribution is lost without an error",
        file="third_party/gloo/gloo/types.h",
        find="    return !(*this == rhs.x);",
        replace="    return x != rhs.x;",
    ),
    Edit(
        name="rendezvous_scope",
        reason="hvd.init() fails now and then when it is called again under Gloo, as in elastic jobs: in the "
        "rendezvous server, the last worker to leave a scope clears the lists of all scopes and not only that of its "
        "own, so that other scopes are never seen as finished and serve the addresses of an earlier round",
        file="horovod/runner/http/http_server.py",
        find="                        self.server.cache.get(scope, {}).clear()\n"
        "                        self.server.finished_list.clear()\n",
        replace="                        self.server.cache.get(scope, {}).clear()\n"
        "                        self.server.finished_list[scope].clear()\n",
    ),
    Edit(
        name="peer_death_with_process_sets",
        reason="in a job with process sets of its own, all surviving ranks abort when a rank dies, instead of raising "
        "HorovodInternalError: at shutdown they negotiate the removal of the process sets, also with the dead rank, "
        "and nothing catches the exception",
        file="horovod/common/process_set.cc",
        find="""  std::vector<int32_t> ids_copy(ids_.begin(), ids_.end());
  for (auto id : ids_copy) {
""",
        replace="""  std::vector<int32_t> ids_copy(ids_.begin(), ids_.end());
  bool peers_reachable = true;
  for (auto id : ids_copy) {
""",
    ),
    Edit(
        name="peer_death_with_process_sets",
        reason="Part of peer_death_with_process_sets: if other ranks cannot be reached, a rank removes its process "
        "sets without a negotiation",
        file="horovod/common/process_set.cc",
        find="""    MarkProcessSetForRemoval(id);
    // Block until all processes have been able to finalize and deregister
    // this process set.
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
""",
        replace="""    if (peers_reachable) {
      MarkProcessSetForRemoval(id);
    }
    // Block until all processes have been able to finalize and deregister
    // this process set.
    while (true) {
      if (peers_reachable) {
        try {
          InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
        } catch (const std::exception& ex) {
          LOG(WARNING) << "Process sets are removed without their peers, "
                          "which cannot be reached any more: "
                       << ex.what();
          peers_reachable = false;
        }
      }
      if (!peers_reachable) {
#if HAVE_GLOO
        id_to_process_set_[id].gloo_context.Disconnect();
#endif
        id_to_process_set_[id].Finalize(status);
        DeregisterProcessSet(id);
        id_to_be_removed_ = NO_PENDING_REMOVAL;
        break;
      }
      if (ProcessSetHasJustBeenRemoved()) {
""",
    ),
    Edit(
        name="in_place_copy",
        reason="under Gloo an all-reduce in place copies the tensor onto itself: memcpy does not allow that, and it "
        "costs a pass over the memory",
        file="horovod/common/ops/gloo_operations.cc",
        find="""    buffer_data = (void*)first_entry.output->data();
    std::memcpy(buffer_data, first_entry.tensor->data(),
                (size_t)first_entry.tensor->size());
    fused_input_data = buffer_data;
""",
        replace="""    buffer_data = (void*)first_entry.output->data();
    if (buffer_data != first_entry.tensor->data()) {
      std::memcpy(buffer_data, first_entry.tensor->data(),
                  (size_t)first_entry.tensor->size());
    }
    fused_input_data = buffer_data;
""",
    ),
    Edit(
        name="gloo_loop",
        reason="each of Gloo's event threads, one for each context, wakes 100 times a second to check whether it "
        "should end, which costs 0.4 ms of CPU time a step on a rank with a fifth of a core. It now wakes once a "
        "second, or when another thread wakes it",
        file="third_party/gloo/gloo/transport/tcp/loop.cc",
        find="    nfds = epoll_wait(fd_, events.data(), events.size(), 10);\n",
        replace="    nfds = epoll_wait(fd_, events.data(), events.size(), 1000);\n",
    ),
    Edit(
        name="gloo_loop",
        reason="Part of gloo_loop: wakes the event thread when it has to end",
        file="third_party/gloo/gloo/transport/tcp/loop.cc",
        find="    done_ = true;\n    loop_->join();\n",
        replace="    done_ = true;\n    defer([] {});\n    loop_->join();\n",
    ),
    Edit(
        name="gloo_loop",
        reason="Part of gloo_loop: wakes the event thread when another thread waits for its next turn. The deferred "
        "function takes the lock, which is free only once that thread waits, so that the signal of the turn cannot "
        "come before the wait and be missed",
        file="third_party/gloo/gloo/transport/tcp/loop.cc",
        find="    std::unique_lock<std::mutex> lock(m_);\n    cv_.wait(lock);\n",
        replace="    std::unique_lock<std::mutex> lock(m_);\n"
        "    defer([this] { std::lock_guard<std::mutex> guard(m_); });\n"
        "    cv_.wait(lock);\n",
    ),
    Edit(
        name="gloo_loop",
        reason="Part of gloo_loop: while another thread holds the lock of a connection, the event thread gets the "
        "same event again and again, and spins; where a rank has a small CPU quota, it uses the quota up while the "
        "other thread needs the core to release the lock. It now sleeps for 20 microseconds before it tries again",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        find="  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n    return;\n",
        replace="  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n"
        "    std::this_thread::sleep_for(std::chrono::microseconds(20));\n    return;\n",
    ),
    Edit(
        name="gloo_loop",
        reason="Part of gloo_loop: includes the headers for the short sleep",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        find="#include <sstream>\n",
        replace="#include <chrono>\n#include <sstream>\n#include <thread>\n",
    ),
    Edit(
        name="gloo_send_buffer",
        reason="after all-reduces of a few values, an all-to-all or all-gather over the same connection stalls, for "
        "40 ms at 64 kB and for seconds at 4 MB: Gloo sets the socket's send buffer to the size of the largest "
        "message that it has sent from a bound buffer so far (4.6 kB, say), and that switches off the kernel's own "
        "sizing. The send buffer is now set once, to the size that the largest messages get. (The kernel's own sizing "
        "would do in most places, but it fills the queue of a slow link, so that packets are lost)",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        find="""  size_t size = std::min(op.preamble.nbytes, kMaxSendBufferSize);
  if (sendBufferSize_ < size) {
    int rv;
    size_t optval = size;
""",
        replace="""  if (sendBufferSize_ == 0) {
    int rv;
    size_t optval = kMaxSendBufferSize;
""",
    ),
    Edit(
        name="sum_at_once",
        reason="TensorFlow takes Horovod's all-reduce, which hands its tensor over and returns, for a long "
        "computation. Those lie on a stack until a thread is free: with one thread often until the backward pass has "
        "ended. It is now run as soon as its tensor is there",
        needs=("tensorflow",),
        file="horovod/tensorflow/mpi_ops.cc",
        find="""class HorovodAllreduceOp : public AsyncOpKernel {
public:
""",
        replace="""class HorovodAllreduceOp : public AsyncOpKernel {
public:
  bool IsExpensive() override { return false; }

""",
    ),
    Edit(
        name="quick_launch",
        reason="every start of horovodrun imports each framework, which takes seconds each, to find out what Horovod "
        "was built with. It now reads that from the record that the build puts into the wheel",
        file="horovod/common/util.py",
        find="""@_cache
def gpu_available(ext_base_name, verbose=False):
""",
        replace=f"""def _recorded(f):
    def wrapper(*args, **kwargs):
        path = os.path.join(os.path.dirname(os.path.dirname(__file__)), '{BUILD_RECORD}')
        try:
            with open(path) as file:
                return json.load(file)['built'][f.__name__]
        except (OSError, ValueError, KeyError):
            return f(*args, **kwargs)

    wrapper.__name__ = f.__name__
    return wrapper


@_cache
def gpu_available(ext_base_name, verbose=False):
""",
    ),
    *(
        Edit(
            name="quick_launch",
            reason=f"Part of quick_launch: reads from the record whether Horovod was built with {of}",
            file="horovod/common/util.py",
            find=f"@_cache\ndef {name}(",
            replace=f"@_cache\n@_recorded\ndef {name}(",
        )
        for name, of in (("mpi_built", "MPI"), ("gloo_built", "Gloo"), ("nccl_built", "NCCL"), ("ddl_built", "DDL"),
                         ("ccl_built", "oneCCL"))
    ),
)
