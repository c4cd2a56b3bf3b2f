"""Kubernetes' ``$(NAME)`` references."""

from __future__ import annotations

from collections.abc import Mapping


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by ``values[NAME]``.

    ``$$`` stands for one ``$``, so that ``$$(NAME)`` is the text ``$(NAME)``; an unknown name and an unclosed reference
    stay as they are. The rules are those of ``k8s.io/kubernetes/third_party/forked/golang/expansion``.
    """
    parts: list[str] = []
    position = 0
    while (dollar := text.find("$", position)) >= 0 and dollar + 1 < len(text):
        parts.append(text[position:dollar])
        following = text[dollar + 1]
        closer = text.find(")", dollar + 2) if following == "(" else -1
        if closer >= 0:
            name = text[dollar + 2 : closer]
            parts.append(values.get(name, f"$({name})"))
            position = closer + 1
        else:
            parts.append("$" if following == "$" else f"${following}")
            position = dollar + 2
    parts.append(text[position:])
    return "".join(parts)
