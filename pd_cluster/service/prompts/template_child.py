"""Renders clients' chat templates: `python -m pd_cluster.service.prompts.template_child FD` (see child_pool.py).

The sandbox keeps a template from accessing the system; this process limits its time and memory. The child's settings
are the model's special tokens; a job is a template and a conversation.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import msgspec

from pd_cluster.engine.start.rank_main import die_with_parent, leave_signals_to_parent
from pd_cluster.errors import ModelError, RequestError
from pd_cluster.service.prompts.conversation import Conversation
from pd_cluster.text.chat_template import ChatTemplate

MAX_NBYTES = 512 << 20  # how much address space a process may use beyond that of a ready one
MAX_NUM_CHARS = 8 << 20  # the longest prompt
NICENESS = 10


class RenderJob(msgspec.Struct, frozen=True):
    """A template and a conversation; None: only the template's variables and roles are returned."""

    source: str
    conversation: Conversation | None = None


class Rendered(msgspec.Struct, frozen=True):
    """The result. `error`: a fault of the template or the conversation; `param`: the field at fault."""

    text: str = ""
    variables: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    error: str = ""
    param: str | None = None


def render(job: RenderJob, constants: dict[str, str]) -> Rendered:
    try:
        template = ChatTemplate(job.source, constants)
        text = job.conversation.render(template) if job.conversation is not None else ""
        text.encode()
    except UnicodeEncodeError:
        return Rendered(error="chat_template: it writes half a character (a lone surrogate)", param="chat_template")
    except ModelError as error:
        return Rendered(error=f"chat_template: {error}", param="chat_template")
    except RequestError as error:
        if error.param == "messages":  # the request's template itself may be at fault
            return Rendered(error=f"chat_template: {error}", param="chat_template")
        return Rendered(error=str(error), param=error.param)
    except MemoryError:
        return Rendered(error="chat_template: it takes too much memory", param="chat_template")
    if len(text) > MAX_NUM_CHARS:
        return Rendered(
            error=f"chat_template: its prompt has {len(text)} characters; at most {MAX_NUM_CHARS} are allowed",
            param="chat_template",
        )
    return Rendered(text, template.variables, template.roles)


def main(fd: int) -> int:
    die_with_parent()
    leave_signals_to_parent()
    os.nice(NICENESS)
    channel = socket.socket(fileno=fd)
    lines = channel.makefile("rb")
    constants = msgspec.json.decode(lines.readline(), type=dict[str, str])
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_NBYTES, in_use + MAX_NBYTES))
    channel.sendall(b"\n")
    while line := lines.readline():
        job = msgspec.json.decode(line, type=RenderJob)
        channel.sendall(msgspec.json.encode(render(job, constants)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
