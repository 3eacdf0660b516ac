"""The processes of one node: the agent, its workers, and what watches over both. No torch.

Read ``agent`` (one loop, which starts, follows and stops workers), ``worker`` (a worker as the agent sees
it), ``bootstrap`` (a worker's own first steps), ``local_rank_option`` (an argument that DeepSpeed's
launcher passes), ``preload`` (one process that imports torch and forks the workers), ``lease`` (until when
workers may run without the launcher), ``watchdog`` and ``rendezvous``.
"""
