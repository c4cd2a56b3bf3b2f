"""The KV-transfer contract between operator, router and engine.

Standard library only, and pure: no clock, socket or environment is read here. The sub-package ``engine`` is the
exception; it runs inside the engine's process and nothing else imports it.
"""
