"""Workers: other processes that make episodes, on this machine or on many.

One protocol (`protocol.Worker`): load weights, run jobs, cancel, close. The process of the run has a pool of them
(`pool.py`), which gives out jobs, gives them again when a worker is lost, and is the only writer to the store. A
worker runs a `Service` (`service.py`) and never opens the store. What differs between the kinds is the link, which
carries messages: `processes.py` over a socket, `ray_actors.py` to a Ray actor. `here` needs no worker: `Rollout`
makes the episodes.
"""
