"""The comments of resumable streams, by which another replica can continue a stream.

A request with ``resume: {}`` gets a stream whose header `HEADER` has its fingerprint, id and time. Each part of the
stream ends with an empty line, and comments, which clients of server-sent events skip, say which tokens the parts
contain:

    : opened
    : tokens INDEX ID ID ...
    : end INDEX ID ID ...
    : failed TYPE CODE
    : done

A comment is on the last part of a step, so parts without a comment belong to the next one. ``opened`` ends what is sent
before decoding, ``end`` a choice's last parts, ``done`` the stream, and ``failed`` a stream that can't continue here. A
replica that gets all of this in ``resume`` sends exactly the rest of the stream.
"""

from __future__ import annotations

EVENT_STREAM = "text/event-stream"
"""The content type of server-sent events."""
HEADER = "parlay-resume"
NO = "no:"
"""The beginning of the header's value if the stream can't be resumed; the reason follows."""
OPENED, TOKENS, END, FAILED, DONE = "opened", "tokens", "end", "failed", "done"
