"""Repairs of what the launcher does with the output of ranks, and where it cannot say what it has to.

- "one_output": --output-filename works with one rank.
- "kept_output": with --output-filename, a process that replaces a failed one appends to its files.
- "any_output": output of ranks that is not UTF-8, or that nobody reads any more, stops no rank.
- "heard_end": a rank that could not be started, or whose end could not be printed, has failed; nobody waits for it.
- "last_words": a failed horovodrun ends with what has failed, and not with how it found out.
"""

from __future__ import annotations

from typing import Final

from hvd_hetero.cli.edits import Edit

EDITS: Final = (
    Edit(
        name="one_output",
        reason="with -np 1 and --output-filename nothing is started, as the logarithm of 0 is taken to name the file; "
        "an elastic job ends with status 0 nevertheless",
        file="horovod/runner/gloo_run.py",
        find="""    width = int(math.log10(size - 1)) + 1
""",
        replace="""    width = len(str(max(size - 1, 1)))
""",
    ),
    Edit(
        name="kept_output",
        reason="with --output-filename, the worker that replaces a failed one in an elastic job overwrites the output "
        "files of the failed one, and with them the message that says why it failed. It now appends to them",
        file="horovod/runner/gloo_run.py",
        find="""            stdout_file = open(os.path.join(output_dir_rank, 'stdout'), 'w')
            stderr_file = open(os.path.join(output_dir_rank, 'stderr'), 'w')
""",
        replace="""            mode = 'a' if index in written else 'w'
            written.add(index)
            stdout_file = open(os.path.join(output_dir_rank, 'stdout'), mode)
            stderr_file = open(os.path.join(output_dir_rank, 'stderr'), mode)
""",
    ),
    Edit(
        name="kept_output",
        reason="Part of kept_output: remembers which output files this job has opened, so that files of an earlier "
        "job are still overwritten",
        file="horovod/runner/gloo_run.py",
        find="""    terminate_all_event = None if settings.elastic else threading.Event()
""",
        replace="""    terminate_all_event = None if settings.elastic else threading.Event()
    written = set()
""",
    ),
    Edit(
        name="any_output",
        reason="the thread that passes on what a rank prints ends at a byte that is not UTF-8, and when its own output "
        "is closed (| head). The rank stands still once 64 KiB are unread, and all others wait for it. Such a byte of "
        "a discovery script loses its hosts, and the job waits for them. The thread now replaces the byte",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""codecs.getincrementaldecoder('utf8')()
""",
        replace="""codecs.getincrementaldecoder('utf8')(errors='replace')
""",
    ),
    Edit(
        name="any_output",
        reason="Part of any_output: characters that the launcher's output cannot show are escaped, and where that "
        "output is closed, the rank's is read all the same",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="""        dst_stream.write(text)
        dst_stream.flush()
""",
        replace="""        write_to(dst_stream, text)
""",
    ),
    Edit(
        name="any_output",
        reason="Part of any_output: writes text to a stream as far as it can be written",
        file="horovod/runner/common/util/safe_shell_exec.py",
        find="def prefix_connection(",
        replace="""def write_to(stream, text):
    encoding = getattr(stream, 'encoding', None) or 'utf8'
    try:
        stream.write(text.encode(encoding, 'backslashreplace').decode(encoding))
        stream.flush()
    except (AttributeError, OSError, ValueError):
        pass  # there is none, or nobody reads it any more


def prefix_connection(""",
    ),
    Edit(
        name="any_output",
        reason="Part of any_output: with --output-filename, what the launcher cannot show is in the files all the same",
        file="horovod/runner/gloo_run.py",
        find="""            f.write(text)
""",
        replace="""            safe_shell_exec.write_to(f, text)
""",
    ),
    Edit(
        name="heard_end",
        reason="where a rank cannot be started, as its folder of --output-filename cannot be written to or its host "
        "has a name that is none, the launcher's thread for it ends with an exception, and nobody hears that it "
        "failed: an elastic job waits for it for ever, or ends with status 0. So it is where nobody reads any more "
        "that a rank has failed (| head). The rank has failed now, whatever the thread meets",
        file="horovod/runner/gloo_run.py",
        find="""        return exit_code, time.time()

    return _exec_command
""",
        replace="""        return exit_code, time.time()

    def _exec_or_fail(command, slot_info, events):
        try:
            return _exec_command(command, slot_info, events)
        except Exception as e:
            safe_shell_exec.write_to(sys.stdout, 'Process {idx} failed: {kind}: {message}\\n'.format(
                idx=slot_info.rank, kind=type(e).__name__, message=e))
            if terminate_all_event:
                terminate_all_event.set()
            return 1, time.time()

    return _exec_or_fail
""",
    ),
    Edit(
        name="heard_end",
        reason="Part of heard_end: a rank whose output a full disk did not take has not failed; that it is missing is "
        "said",
        file="horovod/runner/gloo_run.py",
        find="""            if stdout_file:
                stdout_file.close()
            if stderr_file:
                stderr_file.close()
""",
        replace="""            for file in filter(None, (stdout_file, stderr_file)):
                try:
                    file.close()
                except OSError as e:
                    safe_shell_exec.write_to(sys.stdout, '{name} lacks what Process {idx} said: {message}\\n'.format(
                        name=file.name, idx=index, message=e))
""",
    ),
    Edit(
        name="heard_end",
        reason="Part of heard_end: --verbose starts a rank also where nobody reads its command",
        file="horovod/runner/gloo_run.py",
        find="""            print(command)
""",
        replace="""            safe_shell_exec.write_to(sys.stdout, command + '\\n')
""",
    ),
    Edit(
        name="last_words",
        reason="when a rank fails, or an argument is wrong, horovodrun ends with a traceback of its own, 25 lines that "
        "hide the one of the rank. It now ends with the text of the error; with --verbose also with the traceback",
        file="horovod/runner/launch.py",
        find="""        logging.basicConfig(level=logging.getLevelName(args.log_level))

    _run(args)
""",
        replace="""        logging.basicConfig(level=logging.getLevelName(args.log_level))

    try:
        _run(args)
    except (OSError, RuntimeError, ValueError) as error:
        if args.verbose:
            raise
        sys.exit(f'horovodrun: {error}')
""",
    ),
)
