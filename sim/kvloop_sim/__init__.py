"""A simulator of a vLLM engine with NIXL: its HTTP API, its KV blocks and the life cycle of its KV handles.

No model runs. What is exact is what a router can get wrong: which blocks a request reads, what was in them at that
moment, when they are freed, and what the engine answers, counts or dies of. Text is a function of the KV that a
request attends to, so that a wrong read gives wrong text, as on a real engine.

The core (``tokenizer``, ``template``, ``generation``, ``blocks``, ``transfer``, ``timing``, ``engine``) is free of
clocks and sockets; ``driver``, ``side_channel`` and ``server`` are the shell around it.
"""
