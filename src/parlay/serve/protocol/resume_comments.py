"""Streams that another replica can go on with: what a gateway is told of them, and how it asks for the rest.

A body with ``resume: {}`` gets a stream whose header `HEADER` names its fingerprint, id and time. Each part of it ends
with an empty line, and comments, which clients of server-sent events skip, say which tokens the parts hold:

    : opened
    : tokens INDEX ID ID ...
    : end INDEX ID ID ...
    : failed TYPE CODE
    : done

A comment stands on the last part of those that a step gives, so that parts without one belong to it. ``opened`` ends
what comes before anything is decoded, ``end`` a choice's last parts, ``done`` the stream, and ``failed`` one that can't
go on here. A replica that gets all of this back in ``resume`` sends exactly what would have followed.
"""

from __future__ import annotations

EVENT_STREAM = "text/event-stream"
"""The content type of server-sent events."""
HEADER = "parlay-resume"
NO = "no:"
"""How the header begins where the stream can't be resumed; the reason follows."""
OPENED, TOKENS, END, FAILED, DONE = "opened", "tokens", "end", "failed", "done"
