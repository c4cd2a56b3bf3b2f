"""The HTTP router: one OpenAI-compatible server in front of prefill and decode engines.

Start reading in ``turn.py``: a turn finds its conversation's KV handle, proves how far it may be used, and becomes a
prefill leg and a decode leg.
"""
