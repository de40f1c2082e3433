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
        reason="process sets, the global one included, ignore the chosen network interface and listen on whatever the "
        "host name resolves to, because this context's own interface name is never assigned",
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
        reason="the list of ranks is reserved but never given a size, so that under Gloo the stall inspector looks at "
        "no rank and says nothing",
        file="horovod/common/gloo/gloo_controller.cc",
        find="  global_ranks_.reserve(size_);",
        replace="  global_ranks_.resize(size_);",
    ),
    Edit(
        name="allgather_with_joined",
        reason="sizes are written at the index of the rank into a list as long as the number of requests: with joined "
        "ranks that is shorter, and the heap is overwritten",
        file="horovod/common/controller.cc",
        find="    tensor_sizes.resize(requests.size());",
        replace="    tensor_sizes.resize(size_);",
    ),
    Edit(
        name="vectorised_half",
        reason="Gloo has vectorised sums for fp16, but the build leaves them out: they are 4 to 6 times faster",
        needs=("f16c",),
        file="CMakeLists.txt",
        find="    add_subdirectory(third_party/gloo)\n",
        replace="    set(USE_AVX 1)\n    add_definitions(-DGLOO_USE_AVX=1)\n    add_subdirectory(third_party/gloo)\n",
    ),
    Edit(
        name="vectorised_half",
        reason="the file that holds them is not among Gloo's sources",
        needs=("f16c",),
        file="third_party/gloo/gloo/CMakeLists.txt",
        find='  "${CMAKE_CURRENT_SOURCE_DIR}/gatherv.cc"\n',
        replace='  "${CMAKE_CURRENT_SOURCE_DIR}/gatherv.cc"\n  "${CMAKE_CURRENT_SOURCE_DIR}/math.cc"\n',
    ),
    Edit(
        name="half_assignment",
        reason="Gloo's fp16 is only assigned when it differs, and to differ compares bits with a number: 14744 + 14744 "
        "stays 14744. Every value has one sum (a large one) at which a rank's part is lost without a word",
        file="third_party/gloo/gloo/types.h",
        find="    return !(*this == rhs.x);",
        replace="    return x != rhs.x;",
    ),
    Edit(
        name="rendezvous_scope",
        reason="the last worker to leave one scope clears the lists of all scopes, so that another scope never reaches "
        "its size and stale addresses of an earlier round are served",
        file="horovod/runner/http/http_server.py",
        find="                        self.server.cache.get(scope, {}).clear()\n"
        "                        self.server.finished_list.clear()\n",
        replace="                        self.server.cache.get(scope, {}).clear()\n"
        "                        self.server.finished_list[scope].clear()\n",
    ),
    Edit(
        name="peer_death_with_process_sets",
        reason="when a peer dies, removing the process sets is negotiated with it, outside any try: every survivor "
        "aborts instead of raising HorovodInternalError",
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
        reason="without its peers a rank removes its process sets alone",
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
        reason="an in-place all-reduce copies the tensor onto itself: memcpy forbids that, and it costs a pass",
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
        reason="each of Gloo's event threads, one per context, wakes 100 times a second to look whether it should end: "
        "0.4 ms of CPU a step on a rank with a fifth of a core. It is woken when there is a reason",
        file="third_party/gloo/gloo/transport/tcp/loop.cc",
        find="    nfds = epoll_wait(fd_, events.data(), events.size(), 10);\n",
        replace="    nfds = epoll_wait(fd_, events.data(), events.size(), 1000);\n",
    ),
    Edit(
        name="gloo_loop",
        reason="the end is such a reason",
        file="third_party/gloo/gloo/transport/tcp/loop.cc",
        find="    done_ = true;\n    loop_->join();\n",
        replace="    done_ = true;\n    defer([] {});\n    loop_->join();\n",
    ),
    Edit(
        name="gloo_loop",
        reason="so is a thread that waits for the next turn. What is deferred takes the lock, which is free once that "
        "thread waits: the turn's signal cannot come before",
        file="third_party/gloo/gloo/transport/tcp/loop.cc",
        find="    std::unique_lock<std::mutex> lock(m_);\n    cv_.wait(lock);\n",
        replace="    std::unique_lock<std::mutex> lock(m_);\n"
        "    defer([this] { std::lock_guard<std::mutex> guard(m_); });\n"
        "    cv_.wait(lock);\n",
    ),
    Edit(
        name="gloo_loop",
        reason="while another thread holds a connection's lock, the event thread finds the same event again and again: "
        "it spins, for as long as a rank with a small quota has none left. A short sleep leaves that thread the core",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        find="  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n    return;\n",
        replace="  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n"
        "    std::this_thread::sleep_for(std::chrono::microseconds(20));\n    return;\n",
    ),
    Edit(
        name="gloo_loop",
        reason="what the sleep needs",
        file="third_party/gloo/gloo/transport/tcp/pair.cc",
        find="#include <sstream>\n",
        replace="#include <chrono>\n#include <sstream>\n#include <thread>\n",
    ),
    Edit(
        name="gloo_send_buffer",
        reason="each connection's send buffer is set to the largest of its bound messages so far, which switches the "
        "kernel's own sizing off: after sums of a few values it stays at 4.6 kB, and what else goes that way (an "
        "all-to-all, an all-gather) stalls, 40 ms at 64 kB and seconds at 4 MB. It gets what large messages get, once. "
        "(The kernel's sizing would do in most places; where it fills a slow link's queue, packets are lost)",
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
        name="quick_launch",
        reason="each `horovodrun` loads the frameworks in turn, seconds each, to ask what Horovod was built with. The "
        "record of the build says so",
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
            reason=f"what the record says of {of}",
            file="horovod/common/util.py",
            find=f"@_cache\ndef {name}(",
            replace=f"@_cache\n@_recorded\ndef {name}(",
        )
        for name, of in (("mpi_built", "MPI"), ("gloo_built", "Gloo"), ("nccl_built", "NCCL"), ("ddl_built", "DDL"),
                         ("ccl_built", "oneCCL"))
    ),
)
