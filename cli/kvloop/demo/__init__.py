"""``kvloop demo``: one growing agent conversation, played with reuse off and on.

``script`` writes the conversation, ``arms`` puts two routers before the same engines, ``play`` plays and measures,
``result`` judges, ``report`` shows. All but ``play`` and the files of ``report`` are pure.
"""
