"""The KV-transfer contract between operator, router and engine.

Standard library only, and pure: no clock, socket or environment is read here. The exceptions are ``delivery``, which
copies the package, and the sub-package ``engine``, which runs inside the engine's process and nothing else imports.
"""
