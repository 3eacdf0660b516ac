"""Record defects of the launcher, and of what stands beside it, that no test noticed at one time."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_PROCESSES = ("tests/unit/system/test_processes.py",)
_COMMIT = ("tests/unit/checkpoint/test_commit.py",)
_DURABLE = ("tests/runtime/checkpoint/test_durability.py",)
_REDACT = ("tests/unit/supervisor/test_redact_rows.py",)
_HEARTBEAT = ("tests/unit/supervisor/test_silent_nodes.py",)
_SRUN = ("tests/unit/launchers/test_srun_task.py",)
_TOPOLOGY = ("tests/unit/mesh/test_topology.py",)
_WATCHDOG = ("tests/unit/node/test_watchdog.py",)
_ENV = ("tests/unit/plan/test_worker_env.py",)
_BOUNDS = ("tests/unit/sweep/test_bounds.py",)
_COMET = ("tests/unit/monitor/test_comet_interval.py",)
_MERGE = ("tests/unit/config/test_merge_keys.py",)
_JOB = ("tests/unit/supervisor/test_job.py",)
_LEASE = ("tests/unit/node/test_lease.py",)
_UPLINK = ("tests/unit/node/test_uplink.py",)
_ENDING = ("tests/unit/queue/test_ending.py",)
_DAEMON = ("tests/unit/queue/test_daemon.py",)
_QUEUED = ("tests/unit/cli/test_queued.py",)

MUTATIONS: tuple[Mutation, ...] = (
    # -- processes
    Mutation(
        "zlaunch/system/processes.py",
        "        if int(_stat_fields(process.pid)[19]) == process.start_ticks:\n"
        "            if pidfd is None:",
        "        if _stat_fields(process.pid):\n            if pidfd is None:",
        "a process with a recycled id is killed",
        _PROCESSES,
    ),
    Mutation(
        "zlaunch/system/processes.py",
        "        if start.get(leader.pid, leader.start_ticks) == leader.start_ticks:\n",
        "        if True:\n",
        "the session of a process with a recycled id counts as the run's",
        _PROCESSES,
    ),
    Mutation(
        "zlaunch/system/processes.py",
        "start.get(leader.pid, leader.start_ticks) == leader.start_ticks",
        "start.get(leader.pid) == leader.start_ticks",
        "what a dead leader has left in its session is not found",
        _PROCESSES,
    ),
    Mutation(
        "zlaunch/system/processes.py",
        'marker = b"\\0ZLAUNCH_RUN_ID=" + os.fsencode(run_id) + b"\\0" if',
        'marker = b"\\0ZLAUNCH_RUN_ID=" + os.fsencode(run_id) if',
        "a run whose id begins with another's counts as that run",
        _PROCESSES,
    ),
    Mutation(
        "zlaunch/system/processes.py",
        "while empty_scans < 2 and",
        "while empty_scans < 1 and",
        "a sweep ends after one scan that found nothing",
        _PROCESSES,
    ),
    Mutation(
        "zlaunch/system/processes.py",
        "    return [Process(pid, start[pid]) for pid in found - {own, *spared}]",
        "    return [Process(pid, start[pid]) for pid in found - {own}]",
        "a standby process that is to be spared is swept",
        _PROCESSES,
    ),
    # -- checkpoints on the disk
    Mutation(
        "runtime/checkpoint/format/commit.py",
        'found["host"] != here["host"] or found["space"]',
        'found["space"]',
        "the unfinished save of another host is deleted",
        _COMMIT,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        ' or found["space"] != here["space"]:',
        ":",
        "the unfinished save of another container is deleted",
        _COMMIT,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "(_DEAD_S if _is_gone(left.name) else _STALE_S)",
        "_DEAD_S",
        "the save of a living process is deleted when it pauses",
        _COMMIT,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "moments = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())]",
        "moments = [folder.stat().st_mtime]",
        "a long save counts as left although its files are being written",
        _COMMIT,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "if path.name in (target.tag, latest) or kept < target.keep_last:",
        "if path.name == target.tag or kept < target.keep_last:",
        "what latest names is pruned",
        _COMMIT,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "        json.dump(manifest, file, indent=1)\n"
        "        file.flush()\n        os.fsync(file.fileno())\n",
        "        json.dump(manifest, file, indent=1)\n",
        "the manifest is not synced",
        _DURABLE,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "    sync_folder(temporary)\n    old = put_aside",
        "    old = put_aside",
        "the folder is renamed before the names in it are on the disk",
        _DURABLE,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "        os.rename(temporary, final)\n        sync_folder(final.parent)\n",
        "        os.rename(temporary, final)\n",
        "latest may be on the disk before the checkpoint's name",
        _DURABLE,
    ),
    Mutation(
        "runtime/checkpoint/format/commit.py",
        "            file.write(content)\n            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.write(content)\n            file.flush()\n",
        "latest is renamed before its content is on the disk",
        _DURABLE,
    ),
    Mutation(
        "runtime/checkpoint/format/writer.py",
        "            os.ftruncate(self._fd, self.nbytes)\n            os.fsync(self._fd)\n",
        "            os.ftruncate(self._fd, self.nbytes)\n",
        "a file of tensors is not synced",
        _DURABLE,
    ),
    # -- secrets
    Mutation(
        "zlaunch/supervisor/redact.py",
        '    "GitLab": r"glpat-[\\w-]{16,}",\n',
        "",
        "GitLab's tokens are shown",
        _REDACT,
    ),
    Mutation(
        "zlaunch/supervisor/redact.py",
        '    "NVIDIA": r"nvapi-[\\w-]{16,}",\n',
        "",
        "NVIDIA's tokens are shown",
        _REDACT,
    ),
    Mutation(
        "zlaunch/supervisor/redact.py",
        'r"pypi-[\\w-]{32,}"',
        'r"pypi_[\\w-]{32,}"',
        "PyPI's tokens are shown",
        _REDACT,
    ),
    Mutation(
        "zlaunch/supervisor/redact.py",
        '    "Google": r"AIza[\\w-]{30,}",\n',
        "",
        "Google's keys are shown",
        _REDACT,
    ),
    Mutation(
        "zlaunch/supervisor/redact.py",
        "gh[opsur]_",
        "gh[ops]_",
        "GitHub's refresh tokens are shown",
        _REDACT,
    ),
    Mutation("zlaunch/plan/plan.py", "|COOKIE|", "|", "values of COOKIE are shown", _REDACT),
    Mutation("zlaunch/plan/plan.py", "|PASSPHRASE|", "|", "values of PASSPHRASE are shown", _REDACT),
    Mutation("zlaunch/plan/plan.py", "(?:PG)?PASS(", "PASS(", "values of PGPASS are shown", _REDACT),
    Mutation("zlaunch/plan/plan.py", "KEY(?![A-Z])|", "KEY|", "keyboard counts as a secret", _REDACT),
    # -- a launcher that stood still
    Mutation(
        "zlaunch/supervisor/heartbeat.py",
        "            if now - looked_at > 2 * pause_s:\n                self.forgive()\n",
        "",
        "a launcher that stood still takes every node for lost",
        _HEARTBEAT,
    ),
    Mutation(
        "zlaunch/supervisor/heartbeat.py",
        "        self._paused = False\n"
        "        self._heard = [boot_clock.now_s()] * len(self._links)\n\n    def heard",
        "        self._heard = [boot_clock.now_s()] * len(self._links)\n\n    def heard",
        "a launcher that goes on after Ctrl-Z sends no pings",
        _HEARTBEAT,
    ),
    Mutation(
        "zlaunch/supervisor/heartbeat.py",
        "            self.heard(index)\n            self._excused[index] = False",
        "            self._excused[index] = False",
        "a node is lost as soon as the console takes its output again",
        _HEARTBEAT,
    ),
    Mutation(
        "zlaunch/supervisor/heartbeat.py",
        "        if self._period_s > 0:\n            self._heard = [boot_clock.now_s()] * len(self._links)\n",
        "        if self._period_s > 0:\n",
        "the time that a start takes counts as silence",
        _HEARTBEAT,
    ),
    # -- nodes that are not alike
    Mutation(
        "zlaunch/launchers/srun_task.py",
        "first, world = sum(counts[: place.rank_of_node]), sum(counts)",
        "first, world = here * place.rank_of_node, here * len(counts)",
        "tasks of nodes with different numbers of GPUs do not agree on ranks",
        _SRUN,
    ),
    Mutation(
        "zlaunch/launchers/srun_task.py",
        "                local_world=place.tasks_here,\n",
        "",
        "each task takes all cores of its node, and is the only one there",
        _SRUN,
    ),
    Mutation(
        "zlaunch/launchers/srun_task.py",
        "tokens[place.local_task % len(tokens)]",
        "tokens[0]",
        "all tasks of a node share its first GPU",
        _SRUN,
    ),
    Mutation(
        "zlaunch/launchers/srun_task.py",
        ".{allocation.restart_count}.{attempt}",
        "",
        "an attempt meets at the port of the one before",
        _SRUN,
    ),
    Mutation(
        "runtime/mesh/topology.py",
        "ranks[0] // size != ranks[-1] // size and (",
        "len(ranks) != size and (",
        "groups of several whole nodes are refused",
        _TOPOLOGY,
    ),
    Mutation(
        "runtime/mesh/topology.py",
        "(ranks.start % size > 0 or ranks.stop % size > 0)",
        "len(ranks) % size > 0",
        "a node that lies across two groups is cut",
        _TOPOLOGY,
    ),
    Mutation(
        "runtime/mesh/topology.py",
        "        return [range(place, self.world_size, self.size) for place in range(self.size)]",
        "        return [range(place, self.world_size, self.count) for place in range(self.count)]",
        "replicas are mixed up where there are more ranks in a group than groups",
        _TOPOLOGY,
    ),
    Mutation(
        "zlaunch/plan/worker_env.py",
        "node.cores // (node.local_world or node.workers)",
        "node.cores // node.workers",
        "tasks of a step take all threads of their node each",
        _ENV,
    ),
    Mutation(
        "zlaunch/plan/worker_env.py",
        "str(max(1, node.cores // (node.local_world or node.workers)))",
        "str(node.cores // (node.local_world or node.workers))",
        "more workers than cores have no thread",
        _ENV,
    ),
    Mutation(
        "zlaunch/plan/worker_env.py",
        "given = run.environ.keys() | node.env.keys()",
        "given = run.environ.keys()",
        "threads that --env sets are overwritten",
        _ENV,
    ),
    Mutation(
        "zlaunch/plan/worker_env.py",
        "single_node=part.node_count == 1",
        "single_node=True",
        "nodes meet at the loopback",
        _ENV,
    ),
    # -- frozen agents
    Mutation(
        "zlaunch/node/watchdog.py",
        "            pause_ms = _LOOK_MS\n",
        "",
        "a frozen agent whose launcher is gone stays",
        (f"{_WATCHDOG[0]}::test_an_agent_is_looked_at_again_and_again_once_its_launcher_is_gone",),
    ),
    Mutation(
        "zlaunch/node/watchdog.py",
        "            kill(agent, signal.SIGCONT)\n",
        "            pass\n",
        "a frozen agent whose launcher is gone is seen and stays",
        (f"{_WATCHDOG[0]}::test_an_agent_is_looked_at_again_and_again_once_its_launcher_is_gone",),
    ),
    Mutation(
        "zlaunch/node/watchdog.py",
        "            poller.unregister(launcher)\n",
        "",
        "a watchdog whose launcher is gone is never idle",
        (f"{_WATCHDOG[0]}::test_an_agent_is_looked_at_again_and_again_once_its_launcher_is_gone",),
    ),
    Mutation(
        "zlaunch/node/watchdog.py",
        "        if not _reap():\n            sweep(ancestor=os.getpid(), reap=_reap)\n",
        "        _reap()\n",
        "what a killed agent has started stays",
        _WATCHDOG,
    ),
    # -- bounds
    Mutation(
        "zlaunch/sweep/space.py",
        "or numbers[0] > numbers[1]",
        "or numbers[0] >= numbers[1]",
        "a range of one number is refused",
        _BOUNDS,
    ),
    Mutation(
        "zlaunch/sweep/space.py",
        "        return chance.randint(low, high)",
        "        return chance.randrange(low, max(high, low + 1))",
        "the upper end of a range of whole numbers is never drawn",
        _BOUNDS,
    ),
    Mutation(
        "zlaunch/sweep/space.py",
        "if trials > most:",
        "if trials >= most:",
        "a grid as large as the limit is refused",
        _BOUNDS,
    ),
    Mutation(
        "runtime/monitor/trackers.py",
        "abs(step - self._last[name]) < self._interval",
        "abs(step - self._last[name]) <= self._interval",
        "Comet gets every second value of those an interval apart",
        _COMET,
    ),
    Mutation(
        "runtime/monitor/trackers.py",
        "abs(step - self._last[name]) < self._interval",
        "step - self._last[name] < self._interval",
        "Comet gets nothing after a return to an earlier step",
        _COMET,
    ),
    Mutation(
        "runtime/config/load.py",
        'name not in ("?", "<<")',
        'name != "?"',
        "two merge keys in a mapping count as one key given twice",
        _MERGE,
    ),
    # -- attempts
    Mutation(
        "zlaunch/supervisor/job.py",
        "elif restarts < limits.max_restarts:",
        "elif restarts <= limits.max_restarts:",
        "there is one restart more than was allowed",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "or outcome.signum or outcome.save_asked:",
        "or outcome.signum:",
        "a run that has saved and wants to end is started again",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "            port_retried = True\n",
        "",
        "a port that is always taken is tried for ever",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "and not job.options.master_port:",
        ":",
        "another port than --master_port is tried",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "    agents.keep([controller.links[index] for index in controller.waiting])\n",
        "",
        "an agent that is gone is used for the next attempt",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "    if outcome.died:\n",
        "    if outcome.lost:\n",
        "hosts that are only silent are swept, and not only those whose agent died",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "            at_end()  # a second signal must not end this report of the first\n",
        "",
        "a second signal ends the launcher with a traceback",
        _JOB,
    ),
    # -- what an agent takes for silence
    Mutation(
        "zlaunch/node/uplink.py",
        "stop_at is None or now < stop_at:",
        "stop_at is None or now < stop_at + grace_s:",
        "the grace period lies behind the lease",
        _UPLINK,
    ),
    Mutation(
        "zlaunch/node/uplink.py",
        '                self.lease.extend(float(command["lease"]))\n',
        "                pass\n",
        "an agent leaves a launcher that it hears",
        _UPLINK,
    ),
    Mutation(
        "zlaunch/node/uplink.py",
        "return not self.lease_is_over()",
        "return True",
        "a plan that has been on its way for long starts a second set of ranks",
        _UPLINK,
    ),
    Mutation(
        "zlaunch/node/uplink.py",
        "        self.heartbeat_s, self._heard_at = None, boot_clock.now_s()",
        "        self.heartbeat_s = None",
        "after a long attempt an agent does not wait for the next plan",
        _UPLINK,
    ),
    Mutation(
        "zlaunch/node/uplink.py",
        "            if self.outbox.pending < before:\n                moved_at = boot_clock.now_s()\n",
        "",
        "a long output is cut off at its end",
        _UPLINK,
    ),
    # -- leases
    Mutation(
        "zlaunch/supervisor/heartbeat.py",
        "        return last + self._period_s\n",
        "        return boot_clock.now_s() + self._period_s\n",
        "a node that is silent gets longer and longer leases",
        ("tests/unit/supervisor/test_heartbeat.py",),
    ),
    Mutation(
        "zlaunch/supervisor/clock_bound.py",
        "        self._present = min(self._present, now - beat)\n",
        "        self._present = now - beat\n",
        "answers that are read late make leases shorter",
        ("tests/unit/supervisor/test_heartbeat.py",),
    ),
    Mutation(
        "zlaunch/node/uplink.py",
        "end = boot_clock.now_s() + heartbeat_s if lease_end is None else lease_end",
        "end = boot_clock.now_s() + heartbeat_s",
        "the lease of a plan begins when it arrives, however long it was on its way",
        _UPLINK,
    ),
    Mutation(
        "zlaunch/supervisor/heartbeat.py",
        "return max(self._until(index), self._long_until[index]) + _LATE_S",
        "return self._until(index) + _LATE_S",
        "a node that waits for a stopped launcher runs beside its successor",
        ("tests/unit/supervisor/test_heartbeat.py",),
    ),
    Mutation(
        "zlaunch/supervisor/job.py",
        "            _await_leases(outcome.left, console)\n",
        "            pass\n",
        "the next attempt begins while a lost node still runs",
        _JOB,
    ),
    Mutation(
        "zlaunch/supervisor/verdict.py",
        '            return End(self.code, "stopped")\n',
        '            return End(self.code, "failed")\n',
        "a run that the user has stopped is tried again",
        ("tests/unit/supervisor/test_controller.py",),
    ),
    # -- the queue
    Mutation(
        "zlaunch/queue/ending.py",
        'known.wish not in ("cancel", "cancelling")',
        'known.wish != "cancel"',
        "a job that is being cancelled is signalled again, which kills it",
        _ENDING,
    ),
    Mutation(
        "zlaunch/queue/ending.py",
        "    if not store.end(job, end, why):\n        return False\n",
        "    store.end(job, end, why)\n",
        "a run that was started meanwhile is marked as ended",
        _ENDING,
    ),
    Mutation(
        "zlaunch/queue/ending.py",
        "        if time.time() - run.record.started > _ORPHAN_S:",
        "        if True:",
        "a run whose submit is on its way has failed",
        _ENDING,
    ),
    Mutation(
        "zlaunch/queue/daemon.py",
        'elif self._store.ask(job, "cancelling" if job.wish == "cancel" else "timeout"):',
        "else:",
        "a job beyond its time limit is signalled at every look, which kills it",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/judge.py",
        'if job.wish == "timeout":',
        "if False:",
        "the end at a time limit is not explained",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/judge.py",
        "return Judgement(end, why, again, failures + 1, refusals)",
        "return Judgement(end, why, again, failures, refusals)",
        "a failing job is tried again for ever",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/judge.py",
        'job.wish == "preempt" and (end.cause',
        "(end.cause",
        "a run that has saved by itself begins again",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/lost.py",
        "    return not run_processes(name)\n",
        "    return True\n",
        "slots are given away while the agents of a killed launcher still use them",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/lost.py",
        "lost_for_s >= heartbeat_s + _LEASE_S",
        "True",
        "the slots of other hosts are given away before their leases have run out",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/judge.py",
        'end.cause in ("failed", "lost") and failures',
        "end.code not in (2, 130, 143) and failures",
        "what a worker's own signal ends is never tried again",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/daemon.py",
        "            resting,\n        )",
        "            (),\n        )",
        "one dead host eats the queue",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/daemon.py",
        "return job.started_clock + job.submission.time_s - boot_clock.now_s()",
        "return (job.started or 0.0) + job.submission.time_s - time.time()",
        "a clock step ends a job at its time limit",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/stop.py",
        "        if name := run_id(job):\n            sweep(name)\n",
        "",
        "what a killed launcher leaves keeps running on slots that are free",
        _DAEMON,
    ),
    Mutation(
        "zlaunch/queue/process_settings.py",
        "                os.setpriority(os.PRIO_PROCESS, 0, self.nice)\n",
        "                pass\n",
        "a job runs with the nice value of the first submitter",
        ("tests/unit/queue/test_process_settings.py",),
    ),
    Mutation(
        "zlaunch/queue/store.py",
        "        except _UnreadableRowError as error:\n            job = _unreadable(row, str(error))\n",
        "        except ZeroDivisionError as error:\n            job = _unreadable(row, str(error))\n",
        "one row of another version stops the whole queue",
        ("tests/unit/queue/test_store.py",),
    ),
    Mutation(
        "zlaunch/supervisor/found_runs.py",
        "        if not self.record.is_of_other_namespace:\n",
        "        if True:\n",
        "a run in a container of this host is gone",
        ("tests/unit/supervisor/test_found_runs.py",),
    ),
    # -- signals outside of a queued run
    Mutation(
        "zlaunch/cli/queued.py",
        "        _handle_signals()\n        try:",
        "        try:",
        "a time limit that falls into the start kills the launcher",
        _QUEUED,
    ),
    Mutation(
        "zlaunch/cli/queued.py",
        "signal.SIGHUP, signal.SIGUSR1)",
        "signal.SIGHUP)",
        "a request to make room kills a launcher that has not begun",
        _QUEUED,
    ),
    Mutation(
        "zlaunch/cli/queued.py",
        '"--first_attempt", str(request.attempt), *arguments])\n        _ignore_signals()\n',
        '"--first_attempt", str(request.attempt), *arguments])\n',
        "a signal after the run keeps its end from being written",
        _QUEUED,
    ),
    Mutation(
        "zlaunch/cli/queued.py",
        "    if record is not None and record.pid == os.getpid() and record.exit_code is not None:\n"
        "        return int(record.exit_code)\n",
        "",
        "a signal right after a run that has ended well makes it a stopped one",
        _QUEUED,
    ),
    Mutation(
        "zlaunch/cli/queued.py",
        "        _ignore_signals()  # a second one must not interrupt what the first one has begun\n",
        "        pass\n",
        "a second signal at once ends a queued run's launcher with a traceback",
        _QUEUED,
    ),
)
