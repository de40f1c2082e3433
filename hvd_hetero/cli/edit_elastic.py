"""Repairs of what happens when the ranks of an elastic job initialise Horovod again after a change of ranks.

- "fresh_settings": a process that initialises again reads its settings anew, like a process that joins.
- "failed_init": if another rank dies meanwhile, `hvd.init()` raises and can be called again; the job goes on.
- "connect_timeout": Gloo waits its time-out for a connection, and not five times as long.
- "failure_disconnects": after a failure a rank closes all connections, so that the others notice at once.
- "cross_scope": ranks of different nodes that have the same place within their node find each other also in a process
  set with a part of a node's ranks, or if rank 0 is not the first of its node.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

_OPERATIONS = "horovod/common/operations.cc"

EDITS: Final = (
    Edit(
        name="fresh_settings",
        reason="when an elastic job initialises Horovod again, workers that stay keep their old settings, while "
        "workers that join read theirs from the environment: ranks then fuse tensors differently, sum unlike tensors "
        "in one operation, or wait for ever. With HOROVOD_AUTOTUNE, those that stay keep the tuned values. With a "
        "fixed HOROVOD_CYCLE_TIME, they get a fusion threshold of 1 MB instead of 128 MB, as the default is written "
        "into the place of another setting; with a fixed threshold as well, they end at once. All ranks now start "
        "from the environment, and tune anew",
        file=_OPERATIONS,
        find="""  // Override Tensor Fusion threshold, if it's set.
""",
        replace="""  // Others hold references to it.
  state.parameter_manager.~ParameterManager();
  new (&state.parameter_manager) ParameterManager();

  // Override Tensor Fusion threshold, if it's set.
""",
    ),
    Edit(
        name="failed_init",
        reason="if one more worker of an elastic job dies while the others initialise Horovod again, the whole job "
        "ends: Gloo's exception leaves the background thread, where nothing catches it, and every rank aborts. Now "
        "hvd.init() raises an error, and can be called again",
        file=_OPERATIONS,
        find="""#if HAVE_GLOO
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
    global_gloo_context.InitializeFromMPI(
        state.process_set_table.Get(0).mpi_context, ParseGlooIface());
  } else
#endif // HAVE_MPI
  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
#endif // HAVE_GLOO
""",
        replace="""#if HAVE_GLOO
  std::string gloo_failure;
  try {
#if HAVE_MPI
    if (global_mpi_context.IsEnabled()) {
      global_gloo_context.InitializeFromMPI(
          state.process_set_table.Get(0).mpi_context, ParseGlooIface());
    } else
#endif // HAVE_MPI
    {
      global_gloo_context.Initialize(ParseGlooIface());
    }
    if (state.control_operation == LibType::GLOO) {
      state.process_set_table.Initialize(global_gloo_context);
    }
  } catch (const std::exception& ex) {
    gloo_failure = ex.what();
  }
  if (!gloo_failure.empty()) {
    LOG(WARNING) << "Horovod could not be initialized: " << gloo_failure;
    if (state.control_operation == LibType::GLOO) {
      state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
    }
    global_gloo_context.Finalize();
    state.initialization_failed = true;
    return;
  }
#endif // HAVE_GLOO
""",
    ),
    Edit(
        name="failed_init",
        reason="Part of failed_init: forgets the failure of an earlier hvd.init() when a new one starts, as that may "
        "succeed",
        file=_OPERATIONS,
        find="""    horovod_global.initialization_done = false;
    horovod_global.background_thread =
""",
        replace="""    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
    horovod_global.background_thread =
""",
    ),
    Edit(
        name="failed_init",
        reason="Part of failed_init: a worker that was removed from the elastic job must not try hvd.init() again. "
        "Upstream ends it by an exception that nothing catches; as such exceptions are now caught, it ends itself "
        "with status 75",
        file="horovod/common/gloo/gloo_context.cc",
        find="""      out << hostname_ << "[" << local_rank << "] has been removed from elastic job";
      throw std::runtime_error(out.str());
""",
        replace="""      out << hostname_ << "[" << local_rank << "] has been removed from elastic job";
      LOG(WARNING) << out.str();
      std::_Exit(75);
""",
    ),
    Edit(
        name="failed_init",
        reason="Part of failed_init: includes the header that declares std::_Exit",
        file="horovod/common/gloo/gloo_context.cc",
        find="#include <chrono>\n#include <iterator>\n",
        replace="#include <chrono>\n#include <cstdlib>\n#include <iterator>\n",
    ),
    Edit(
        name="connect_timeout",
        reason="when an elastic job initialises Horovod again, a worker may die or lose its link after it has given "
        "its address and before another one has connected to it. Gloo waits five times its time-out (150 s) for such "
        "a connection, while the other workers start over after 30 s, and then wait two minutes for those that still "
        "wait for the lost one. In elastic jobs Gloo now waits for its time-out once",
        file="third_party/gloo/gloo/transport/tcp/pair.h",
        find="        timeout_ * 5,\n",
        replace="""        timeout_ * ([] {
          const char* elastic = std::getenv("HOROVOD_ELASTIC");
          return elastic != nullptr && std::atoi(elastic) > 0;
        }() ? 1 : 5),
""",
    ),
    Edit(
        name="connect_timeout",
        reason="Part of connect_timeout: includes the header of std::getenv, with which HOROVOD_ELASTIC is read",
        file="third_party/gloo/gloo/transport/tcp/pair.h",
        find="#include <condition_variable>\n",
        replace="#include <condition_variable>\n#include <cstdlib>\n",
    ),
    Edit(
        name="failure_disconnects",
        reason="after the death of a worker, ranks that exchange no data with it directly hang for Gloo's time-out "
        "(30 s) before they see an error: a rank that has noticed the death keeps its connections open until the next "
        "hvd.init(), because the Gloo contexts of process sets, the global one included, are never closed. It now "
        "closes them",
        file=_OPERATIONS,
        find="void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
        replace="static std::atomic_bool background_loop_failed{false};\n\n"
        "void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
    ),
    Edit(
        name="failure_disconnects",
        reason="Part of failure_disconnects: records that the background loop has failed. After an orderly end "
        "connections stay open, as slower ranks may still be reading from them",
        file=_OPERATIONS,
        find="""        << "Horovod background loop uncaught exception: " << ex.what();
""",
        replace="""        << "Horovod background loop uncaught exception: " << ex.what();
    background_loop_failed = true;
""",
    ),
    Edit(
        name="failure_disconnects",
        reason="Part of failure_disconnects: after a failure, closes the connections of the global process set. All "
        "other process sets have been removed before this point",
        file=_OPERATIONS,
        find="""    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
""",
        replace="""    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
    if (background_loop_failed.exchange(false)) {
      horovod_global.process_set_table.Get(0).gloo_context.Disconnect();
    }
""",
    ),
    Edit(
        name="failure_disconnects",
        reason="Part of failure_disconnects: the method that closes the connections of a Gloo context and releases "
        "all that holds the context, such as the hierarchy of gloo_hierarchy. Connections are closed first: a peer "
        "that is still sending would otherwise write into the memory of the hierarchy after it was freed",
        file="horovod/common/gloo/gloo_context.h",
        find="  void Enable() {\n",
        replace="""  void Disconnect() {
    if (ctx != nullptr) {
      ctx->closeConnections();
    }
    hierarchy.reset();
    hierarchy_of.reset();
    global_ctx.reset();
    ctx.reset();
    cross_ctx.reset();
    local_ctx.reset();
  }

  void Enable() {
""",
    ),
    Edit(
        name="cross_scope",
        reason="hvd.init() fails if a process set has some of the ranks of a node only, or if rank 0 of an elastic "
        "job is not the first worker of its node. The ranks with the same local rank on several nodes look for each "
        "other under the position that each of them has among its own node's members of the set: with nodes of ranks "
        "0, 1 and 2, 3 and a set of 0, 1 and 3, ranks 1 and 3 should meet, but 1 is the second and 3 the first of its "
        "node. They now look under the lowest rank of those that should meet",
        file="horovod/common/gloo/gloo_context.cc",
        find="                               std::to_string(local_rank) + process_set_suffix,\n",
        replace="                               std::to_string(global_context_cross_ranks[0]) +\n"
        "                               process_set_suffix,\n",
    ),
)
