"""A view in which users of a project follow a job of their own.

urlpatterns = [path("jobs/<uuid:id>/", JobView.as_view(may_see=owns))]

Answers are JSON, a fragment of HTML for htmx, or server-sent events.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from asgiref.sync import async_to_sync, sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError, connections, transaction
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    StreamingHttpResponse,
)
from django.shortcuts import render
from django.utils import timezone
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.utils.decorators import classonlymethod
from django.views import View

from kjo_django import states
from kjo_django.enqueue.handle import JobHandle, database_of_job, read_everywhere
from kjo_django.enqueue.job_status import progress_of, shown_states
from kjo_django.enqueue.waiting import close_connections, is_kept
from kjo_django.logs import get_logger
from kjo_django.models import NEVER, Job
from kjo_django.operations.redaction import shown_payload, shown_result
from kjo_django.runtime import databases, jobs_database
from kjo_django.states import JobState, JobStatus

logger = get_logger("kjo_django")

EVENTS = "text/event-stream"
DETAILS = {"result": ("result", "content_type"), "error": ("error",), "payload": ("payload",)}
"""What a view may show beside the status, and the columns it takes."""
INTERVAL = 1.0
"""Seconds between two looks at the jobs that viewers of event streams see."""
HEARTBEAT = 15.0
"""Seconds without an event after which a stream sends a comment."""
MAX_VIEWERS = 1000
"""Event streams of one process. Further ones get one event, and their browsers ask again."""
PAUSES = ((10, 1), (60, 2), (600, 5))
"""For jobs younger than so many seconds: seconds until a client should ask again."""
LONG_PAUSE = 15
LONGEST_PAUSE = 60

MaySee = Callable[[HttpRequest, Job], Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a job at one moment."""

    facts: dict[str, Any]
    available_at: datetime
    created_at: datetime

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return bool(self.facts["is_final"])

    @property
    def text(self) -> str:
        """The facts as JSON on one line."""
        return json.dumps(self.facts, ensure_ascii=False, separators=(",", ":"))

    @property
    def tag(self) -> str:
        """A digest of the facts."""
        return _digest(self.text)

    def retry_after(self, now: datetime) -> int:
        """Return the seconds until a client should ask again; 0 if the job has ended."""
        if self.is_final:
            return 0
        wait = (self.available_at - now).total_seconds()
        if self.facts["status"] == JobStatus.SCHEDULED and wait > 0:
            return min(math.ceil(wait), LONGEST_PAUSE)
        age = (now - max(self.created_at, min(self.available_at, now))).total_seconds()
        return next((pause for most, pause in PAUSES if age < most), LONG_PAUSE)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]


class JobView(View):
    """Answers ``GET`` with the state of one job, and nobody else learns that there is such a job.

    An unknown job and one that the user may not see are both answered with 404.

    :cvar may_see: called with the request and the job; only True lets the user see it. Without it
        nobody sees any job.
    :cvar shows: what is shown beside status and progress: of ``result``, ``error`` and ``payload``.
        Secrets are redacted as in the admin.
    :cvar template_name: the template of the fragment for htmx.
    :cvar stream_seconds: the longest stream of events; browsers open the next one by themselves,
        and the permission is asked for again.
    """

    shows: ClassVar[Collection[str]] = ()
    template_name: ClassVar[str] = "kjo_django/job.html"
    stream_seconds: ClassVar[float] = 300.0
    http_method_names: ClassVar[list[str]] = ["get", "head", "options"]  # type: ignore[misc]

    @classonlymethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., HttpResponseBase]:
        """Return the view function.

        :raises TypeError: an argument is unknown, or ``may_see`` cannot be called.
        :raises ValueError: ``shows`` names something else.
        """
        if not callable(initkwargs.get("may_see", cls.may_see)):
            raise TypeError(f"{cls.__name__}: may_see must be a function of a request and a job")
        shows = initkwargs.get("shows", cls.shows)
        unknown = [shows] if isinstance(shows, str) else sorted(set(shows) - DETAILS.keys())
        if unknown:
            known = ", ".join(DETAILS)
            raise ValueError(f"{cls.__name__}: shows={shows!r} must be a list of {known}")
        # A stream must not keep a transaction open.
        return transaction.non_atomic_requests(super().as_view(**initkwargs))

    def may_see(self, request: HttpRequest, job: Job) -> Any:
        """Return True if the user of the request may see the job. By default nobody may."""
        return False

    def get(self, request: HttpRequest, id: Any) -> HttpResponseBase:
        """Answer with the job's state in the format that is asked for."""
        job = _find(id)
        if job is None or not self._is_allowed(request, job):
            response: HttpResponseBase = JsonResponse({"error": "not found"}, status=404)
        else:
            shown = read([job.pk], frozenset(self.shows)).get(job.pk)
            if shown is None:  # pruned in between
                response = JsonResponse({"error": "not found"}, status=404)
            elif request.method == "GET" and _wants_events(request):
                response = self._events(request, job.pk, shown)
            elif request.headers.get("HX-Request") == "true":
                response = self._conditional(request, shown, self._fragment(request, shown))
            else:
                body = HttpResponse(shown.text, content_type="application/json")
                response = self._conditional(request, shown, body)
        response.headers.setdefault("Cache-Control", "private, no-cache")
        patch_vary_headers(response, ["Accept", "HX-Request", "Cookie"])
        return response

    def _is_allowed(self, request: HttpRequest, job: Job) -> bool:
        answer = self.may_see(request, job)
        if inspect.isawaitable(answer):
            answer = async_to_sync(_awaited)(answer)
        return answer is True

    def _fragment(self, request: HttpRequest, shown: Shown) -> HttpResponse:
        result = shown.facts.get("result")
        context = {
            "job": shown.facts,
            "result": result if isinstance(result, str) else json.dumps(result, indent=2),
            "label": JobStatus(shown.facts["status"]).label,
            "url": request.get_full_path(),
            "retry_after": shown.retry_after(timezone.now()),
        }
        return render(request, self.template_name, context)

    def _conditional(
        self, request: HttpRequest, shown: Shown, response: HttpResponse
    ) -> HttpResponseBase:
        tag = f'"{_digest(response.content.decode())}"'
        response.headers["ETag"] = tag
        pause = shown.retry_after(timezone.now())
        answer = get_conditional_response(request, etag=tag, response=response)
        assert answer is not None
        if pause:
            answer.headers["Retry-After"] = str(pause)
        return answer

    def _events(self, request: HttpRequest, key: uuid.UUID, shown: Shown) -> HttpResponseBase:
        last = request.headers.get("Last-Event-ID", "")
        if shown.is_final and last == shown.tag:
            return HttpResponse(status=204)  # the browser does not ask again
        response: HttpResponseBase
        if isinstance(request, ASGIRequest) and Board.viewer_count < MAX_VIEWERS:
            stream = events(key, shown, frozenset(self.shows), last, self.stream_seconds)
            response = StreamingHttpResponse(stream, content_type=EVENTS)
        else:
            # Each browser would occupy a worker; so it asks again later.
            pause = f"retry: {1000 * shown.retry_after(timezone.now())}\n\n"
            body = pause + (event_of(shown) if shown.tag != last else ": unchanged\n\n")
            response = HttpResponse(body, content_type=EVENTS)
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Accel-Buffering"] = "no"  # nginx passes on each event at once
        return response


async def _awaited(answer: Any) -> Any:
    return await answer


def _wants_events(request: HttpRequest) -> bool:
    return request.get_preferred_type(["application/json", "text/html", EVENTS]) == EVENTS


def _find(id: Any) -> Job | None:
    try:
        key = JobHandle.of(id).job_id
    except ValueError:
        return None
    rows = Job.objects.using(database_of_job(key) or databases()[0]).defer("payload", "result")
    return rows.filter(pk=key).first()


# --- What is shown --------------------------------------------------------------------------------

_COLUMNS = (
    *("state", "queue", "handler", "unique_id", "generation", "attempts", "available_at"),
    *("lease_expires_at", "created_at", "finished_at", "result_expires_at"),
)


def read(ids: Collection[uuid.UUID], shows: frozenset[str]) -> dict[uuid.UUID, Shown]:
    """Return what is shown of each of these jobs; an unknown one is missing.

    For any number of jobs: one query to each database that holds jobs, and of coordination the
    leases and the progress of those that are open.
    """
    return read_everywhere(ids, partial(_read, shows=shows))


def _read(ids: Collection[uuid.UUID], shows: frozenset[str]) -> dict[uuid.UUID, Shown]:
    columns = {column for each in shows for column in DETAILS[each]}
    rows = Job.objects.using(jobs_database()).filter(pk__in=ids).only(*_COLUMNS, *columns)
    jobs = list(rows)
    status_of = shown_states(jobs)
    progress = progress_of([job.pk for job in jobs if job.state in states.OPEN])
    return {
        job.pk: Shown(
            facts_of(job, status_of[job.pk], progress.get(str(job.pk)), shows),
            job.created_at if job.available_at == NEVER else job.available_at,
            job.created_at,
        )
        for job in jobs
    }


def facts_of(job: Job, status: JobStatus, progress: Any, shows: frozenset[str]) -> dict[str, Any]:
    """Return what is shown of a job, ready for JSON."""
    facts: dict[str, Any] = {
        "id": str(job.pk),
        "status": str(status),
        "is_final": str(status) in states.FINAL,
        "created_at": job.created_at.isoformat(),
        "finished_at": job.finished_at and job.finished_at.isoformat(),
        "progress": progress and {"percent": progress.percent, "text": progress.text},
    }
    if "result" in shows and job.state == JobState.COMPLETED and is_kept(job):
        facts["result"] = shown_result(job)
    if "error" in shows and job.error and (job.state in states.OPEN or is_kept(job)):
        facts["error"] = job.error
    if "payload" in shows:
        facts["payload"] = shown_payload(job)
    return facts


# --- Server-sent events ---------------------------------------------------------------------------


def event_of(shown: Shown) -> str:
    """Return the event with the facts; that of a job that has ended is named ``end``."""
    name = "event: end\n" if shown.is_final else ""
    return f"{name}id: {shown.tag}\ndata: {shown.text}\n\n"


@dataclass(eq=False, slots=True)
class Viewer:
    """One stream of events of one job."""

    key: uuid.UUID
    shown: Shown | None
    """None: there is no such job any more."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Board:
    """The jobs that viewers on one event loop see, read by one thread with one database session."""

    viewer_count = 0
    """Of all boards of this process."""
    _boards: ClassVar[WeakKeyDictionary[Any, dict[frozenset[str], Board]]] = WeakKeyDictionary()

    def __init__(self, shows: frozenset[str]) -> None:
        self._shows = shows
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, shows: frozenset[str]) -> Board:
        """Return the board of the running loop for views that show this."""
        boards = cls._boards.setdefault(asyncio.get_running_loop(), {})
        return boards.setdefault(shows, cls(shows))

    def add(self, viewer: Viewer) -> None:
        """Let a viewer learn of changes from now on."""
        self._viewers.add(viewer)
        Board.viewer_count += 1
        if self._task is None or self._task.done():
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), context=Context())

    def remove(self, viewer: Viewer) -> None:
        """Undo ``add``."""
        self._viewers.discard(viewer)
        Board.viewer_count -= 1

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="kjo-job-view")
        try:
            while self._viewers:
                keys = {viewer.key for viewer in self._viewers}
                try:
                    found = await loop.run_in_executor(thread, self._read, keys)
                except Exception as error:
                    # Viewers get their heartbeats meanwhile.
                    logger.warning("Jobs that are viewed cannot be read: %s", error)
                else:
                    for viewer in self._viewers:
                        shown = found.get(viewer.key)
                        if viewer.key in keys and shown != viewer.shown:
                            viewer.shown = shown
                            viewer.changed.set()
                await asyncio.sleep(INTERVAL)
        finally:
            thread.submit(connections.close_all)
            thread.shutdown(wait=False)

    def _read(self, keys: Collection[uuid.UUID]) -> dict[uuid.UUID, Shown]:
        try:
            return read(keys, self._shows)
        except DatabaseError:
            connections.close_all()
            raise


async def events(
    key: uuid.UUID, shown: Shown, shows: frozenset[str], last: str, seconds: float
) -> AsyncIterator[str]:
    """Yield the events of a job until it has ended, at most for so many seconds.

    :param shown: what was found when the stream was asked for.
    :param last: the id of the last event that the browser has.
    """
    await sync_to_async(close_connections)()  # the session that the request has used
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    viewer, board = Viewer(key, shown), Board.of(shows)
    board.add(viewer)
    try:
        yield f"retry: {1000 * shown.retry_after(timezone.now())}\n\n"
        while viewer.shown is not None:
            if viewer.shown.tag != last:
                yield event_of(viewer.shown)
                last = viewer.shown.tag
            if viewer.shown.is_final:
                return
            viewer.changed.clear()
            while not viewer.changed.is_set():
                left = deadline - loop.time()
                if left <= 0:
                    return
                try:
                    await asyncio.wait_for(viewer.changed.wait(), min(HEARTBEAT, left))
                except TimeoutError:
                    yield ": waiting\n\n"
        yield "event: end\ndata: null\n\n"
    finally:
        board.remove(viewer)
