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
        reason="a process that initialises once more keeps the settings it had, where one that joins begins with those "
        "of the environment: ranks then sum unlike tensors in one operation, or wait for ever. With HOROVOD_AUTOTUNE "
        "those that stay have what was tuned. With a fixed HOROVOD_CYCLE_TIME, they have a fusion threshold of 1 MB in "
        "place of 128, as the default is written into another setting's place; with a fixed threshold as well, they "
        "end at once. Now all begin alike, and tune anew",
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
        reason="ranks that come together anew may lose another one in that moment. Gloo's exception then leaves the "
        "background thread, outside any try, and every rank aborts: one more death ends the whole job. Now hvd.init() "
        "fails, and can be called again",
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
        reason="a later initialization may succeed",
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
        reason="a worker that was removed from the job has nothing to try again: it ends, as it did by its exception",
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
        reason="what ending needs",
        file="horovod/common/gloo/gloo_context.cc",
        find="#include <chrono>\n#include <iterator>\n",
        replace="#include <chrono>\n#include <cstdlib>\n#include <iterator>\n",
    ),
    Edit(
        name="connect_timeout",
        reason="Gloo waits for a connection five times its time-out, 150 s. While ranks of an elastic job come "
        "together, who has given its address may be gone by the time that another has read it: a cut link, one more "
        "death. The others start over after 30 s, and then wait two minutes for those that still expect it",
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
        reason="what reading the variable needs",
        file="third_party/gloo/gloo/transport/tcp/pair.h",
        find="#include <condition_variable>\n",
        replace="#include <condition_variable>\n#include <cstdlib>\n",
    ),
    Edit(
        name="failure_disconnects",
        reason="a rank that has heard of a death keeps its connections open until ranks come together anew, because "
        "the contexts of process sets, the global one included, are never closed. So ranks that exchange nothing with "
        "the dead one wait for Gloo's whole time-out, 30 s, before they hear of it",
        file=_OPERATIONS,
        find="void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
        replace="static std::atomic_bool background_loop_failed{false};\n\n"
        "void BackgroundThreadLoop(HorovodGlobalState& state) {\n",
    ),
    Edit(
        name="failure_disconnects",
        reason="only after a failure: at an orderly end, slower ranks may still be reading",
        file=_OPERATIONS,
        find="""        << "Horovod background loop uncaught exception: " << ex.what();
""",
        replace="""        << "Horovod background loop uncaught exception: " << ex.what();
    background_loop_failed = true;
""",
    ),
    Edit(
        name="failure_disconnects",
        reason="the other process sets are gone by then",
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
        reason="what closes them; a hierarchy holds its context as well. Closed first: a peer may be in the midst of "
        "sending, and what it sends would go on arriving in the hierarchy's memory, which is gone",
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
        reason="ranks of one place on several nodes look for each other under their place among their node's ranks in "
        "the process set, in the order of ranks. Of nodes of two, that of rank 3 in the set of 0, 1 and 3 is the "
        "first, and that of rank 1, which it is to meet, the second: hvd.init() fails. So it does in an elastic job "
        "where the rank 0 that goes on is the second of its node. Now they go by the first rank of those that meet",
        file="horovod/common/gloo/gloo_context.cc",
        find="                               std::to_string(local_rank) + process_set_suffix,\n",
        replace="                               std::to_string(global_context_cross_ranks[0]) +\n"
        "                               process_set_suffix,\n",
    ),
)
