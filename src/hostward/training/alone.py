"""One thread at a time runs the layers of an attached model: noticing that several do."""

from __future__ import annotations

import threading

from hostward.errors import OrderingError


class Alone:
    """Threads that are within a layer. Backward's own threads, and those that evaluate, are not to be noted."""

    def __init__(self) -> None:
        self._running: dict[int, threading.Thread] = {}

    def enter(self, layer: str) -> None:
        """This thread is about to run `layer`. Raises OrderingError where another one runs one now."""
        me = threading.current_thread()
        # first, so that of two that begin at once one at least sees the other
        self._running[threading.get_ident()] = me
        others = [thread for thread in list(self._running.values()) if thread is not me and thread.is_alive()]
        if others:
            self.leave()
            raise OrderingError(
                f"layer {layer} is called in thread {me.name} while {others[0].name} runs a layer of the same model",
                why="what backward needs next is known from the order of the layers' calls, and two threads have none",
                fix="run forwards of an attached model one after the other (a lock around each step), or detach() it; "
                "where a forward was interrupted, attach anew",
            )

    def leave(self) -> None:
        """This thread runs no layer."""
        self._running.pop(threading.get_ident(), None)
