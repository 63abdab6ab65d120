"""What every screen shares: who may see it, the page round it, and the part that is polled.

A screen is a function of a `Page` (one request of one operator) and returns a response. What
changes by itself is in one template, its live part. A page includes it, and a request with the
header ``X-Kjo-Fragment`` gets it alone: a refresh costs one small response, or an empty one when
nothing changed (ETag).

Where queues have databases of their own, a page shows one database. ``?database=alias`` chooses it,
and a cookie keeps the choice. The forms and refreshes of a page name the database that it shows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.contrib.admin import AdminSite
from django.contrib.auth.context_processors import PermWrapper
from django.core.cache import cache
from django.core.exceptions import PermissionDenied
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseNotModified,
    HttpResponseRedirect,
)
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme, urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.actions import attempted, audited
from kjo_django.conf import get_settings
from kjo_django.operations.actions import Action, Subject, Surface, actions_of
from kjo_django.operations.internal import UserActor
from kjo_django.operations.monitoring.health import shares_by_partition
from kjo_django.operations.queues import queues_here
from kjo_django.operations.safe_text import inert
from kjo_django.runtime import databases, jobs_database, use_database

CACHE_SECONDS = 2.0
"""Seconds for which a screen's data is shared between viewers."""

DATABASE, COOKIE = "database", "kjo_database"
"""The parameter and the cookie that name the database."""

WITHOUT_LOG = {"consumers": gettext_lazy("Workers")}
"""Titles of screens in the navigation where no queue is on a log."""

PAGE = "admin/kjo_django/dashboard/page.html"


@dataclass(frozen=True, slots=True)
class Screen:
    """An address of the dashboard."""

    name: str
    path: str
    view: Callable[..., HttpResponse]
    permission: str = "view_dashboard"
    """Permissions needed beside ``view_dashboard``."""
    title: Any = ""
    """Title in the navigation; empty: not in it."""
    is_action: bool = False
    """Whether it takes POST only."""
    model: str = ""
    """Model whose rows it shows, or one of them: it leads to what the admin itself has of them."""


class Page:
    """One request of one operator."""

    def __init__(
        self,
        request: HttpRequest,
        site: AdminSite,
        screens: Sequence[Screen],
        model: str = "",
        key: Any = None,
    ) -> None:
        self.request = request
        self.site = site
        self._screens = screens
        self._model = model
        self._key = key
        request.current_app = site.name  # what {% url %} asks

    # --- Who --------------------------------------------------------------------------------------

    def may(self, permission: str) -> bool:
        """Return whether the operator has a permission of the app, such as ``retry_job``."""
        return bool(self.request.user.has_perm(f"kjo_django.{permission}"))

    @property
    def actor(self) -> UserActor:
        """The operator's name, for the log and the notes."""
        return UserActor(self.request.user)

    def buttons(
        self, subject: Subject, state: str, key: Any, name: str = ""
    ) -> list[dict[str, Any]]:
        """Return the buttons of one row: the actions that this operator may do to it in its state.

        :param key: of the row, in the addresses.
        :param name: of the row, for screen readers.
        """
        return [
            {
                "label": action.label,
                "title": inert(f"{action.label}: {name}") if name else "",
                "url": self.url(screen_of(action), key),
                "is_dangerous": action.is_dangerous,
                "asks": action.asks_first,
            }
            for action in button_actions(subject)
            if self.allows(action) and action.applies(state)
        ]

    def allows(self, action: Action) -> bool:
        """Return whether the operator has the permissions of an action."""
        return action.is_allowed(self.request.user)

    # --- Answers ----------------------------------------------------------------------------------

    def show(
        self,
        live: str,
        context: dict[str, Any],
        *,
        title: Any,
        controls: str = "",
        below: str = "",
        status: int = 200,
    ) -> HttpResponse:
        """Return a page.

        :param live: name of the template of the part that is polled; "" for none.
        :param controls: name of the template of what stays as it is: search, forms.
        :param below: name of the template of what stays as it is below the live part.
        """
        folder = "admin/kjo_django/dashboard/"
        may = PermWrapper(self.request.user)["kjo_django"]  # for templates: may.retry_job
        several = {"databases": self._databases(), "database": jobs_database()}
        shown = {"may": may, "here": self._here, "has_log": self.has_log}
        context = {**shown, **several, **context}
        if self.request.headers.get("X-Kjo-Fragment") and live:
            return self._fragment(render_to_string(folder + live, context, self.request))
        context |= {
            **self.site.each_context(self.request),
            "title": inert(str(title)),
            "live_template": live and folder + live,
            "controls_template": controls and folder + controls,
            "below_template": below and folder + below,
            "navigation": self._navigation(),
            "plain": self._plain(),
            "zone": timezone.get_current_timezone_name(),
        }
        return TemplateResponse(self.request, PAGE, context, status=status)

    def _fragment(self, content: str) -> HttpResponse:
        etag = f'"{hashlib.sha256(content.encode()).hexdigest()[:32]}"'
        if self.request.headers.get("If-None-Match") == etag:
            response: HttpResponse = HttpResponseNotModified()
        else:
            response = HttpResponse(content)
        response.headers["ETag"] = etag
        return response

    @functools.cached_property
    def has_log(self) -> bool:
        """Whether a queue is on a log such as Kafka. Elsewhere there are no partitions, offsets and
        rebalances, and no screen names them."""
        conf = get_settings()
        return any(shares_by_partition(conf.queue(name)) for name in queues_here())

    def _navigation(self) -> list[dict[str, Any]]:
        return [
            {
                "title": screen.title
                if self.has_log
                else WITHOUT_LOG.get(screen.name, screen.title),
                "url": self.url(screen.name),
                "is_here": self._is_at(screen),
                # With Shift it opens the screen; schedules have the S.
                "key": "T" if screen.name == "status" else screen.name[0].upper(),
            }
            for screen in self._screens
            if screen.title and self.may(screen.permission)
        ]

    def _databases(self) -> list[dict[str, Any]]:
        """Return a link to each database that holds jobs; none where it is one."""
        known, here = databases(), jobs_database()
        return [
            {
                "title": inert(alias),
                "url": f"{self.url('overview')}?{urlencode({DATABASE: alias})}",
                "is_here": alias == here,
            }
            for alias in (known if len(known) > 1 else ())
        ]

    def _plain(self) -> dict[str, Any]:
        """Return the link to the admin's own list of the screen's rows, or to its page of a row."""
        if not self._model or not self.may(f"view_{self._model}"):
            return {}
        if jobs_database() != databases()[0]:
            return {}  # the admin's own lists are those of the first database
        is_list = self._key is None
        place = f"admin:kjo_django_{self._model}_{'changelist' if is_list else 'change'}"
        arguments = () if is_list else (self._key,)
        try:
            url = reverse(place, args=arguments, current_app=self.site.name)
        except NoReverseMatch:  # the project has unregistered it
            return {}
        label = _("Plain list, with filters") if is_list else _("All fields, and who changed them")
        return {"url": url, "label": label}

    def _is_at(self, screen: Screen) -> bool:
        return self._here.startswith(self.url(screen.name)) and (
            screen.path != "" or self._here == self.url(screen.name)
        )

    @property
    def _here(self) -> str:
        return self.request.path

    def url(self, name: str, *arguments: Any) -> str:
        """Return the address of a screen."""
        return reverse(f"admin:{address_name(name)}", args=arguments, current_app=self.site.name)

    def back(self, name: str, *arguments: Any) -> HttpResponse:
        """Redirect to the page that the form names, or else to a screen."""
        wanted = self.request.POST.get("next", "")
        hosts = {self.request.get_host()}
        if not url_has_allowed_host_and_scheme(
            wanted, hosts, require_https=self.request.is_secure()
        ):
            wanted = self.url(name, *arguments)
        return HttpResponseRedirect(wanted)

    # --- Actions ----------------------------------------------------------------------------------

    def message(self, text: str, level: int = messages.SUCCESS) -> None:
        """Show a message on the next page."""
        messages.add_message(self.request, level, inert(str(text)))

    def audit(self, message: str) -> Callable[[Sequence[Any]], None]:
        """Return an observer that writes a log entry with the user for each object."""
        return audited(self.request, message)

    def attempt(self, act: Callable[[], Any]) -> Any:
        """Return the result of an operation. An error that refuses it is shown as a message, and
        None is returned.
        """
        return attempted(self.message, act)


def button_actions(subject: Subject) -> list[Action]:
    """Return the actions on rows of a subject that have an address of their own.

    Limits, payloads of dead letters and schedules are edited on screens of their own.
    """
    found = actions_of(subject, Surface.DASHBOARD)
    return [
        action
        for action in found
        if action.name not in ("limit", "edit_and_replay", "edit", "change")
    ]


def screen_of(action: Action) -> str:
    """Return the name of the screen that carries out an action."""
    if action.subject == Subject.LETTERS:
        return action.name
    return f"{action.subject.removesuffix('s')}_{action.name}"


def address_name(name: str) -> str:
    """Return the name of a screen's address; the first screen has the one the admin links to."""
    return f"kjo_django_dashboard_{'changelist' if name == 'overview' else name}"


def opened(screen: Screen, site: AdminSite, screens: Sequence[Screen]) -> Callable[..., Any]:
    """Return the view of a screen."""

    def show(request: HttpRequest, **arguments: Any) -> HttpResponse:
        key = next(iter(arguments.values()), None)
        page = Page(request, site, screens, screen.model, key)
        if not (page.may("view_dashboard") and page.may(screen.permission)):
            raise PermissionDenied(_("You may not do this."))
        if screen.is_action and request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        return screen.view(page, **arguments)

    def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        chosen = _chosen_database(request)
        if chosen is None:
            return show(request, **arguments)
        with use_database(chosen):
            response = show(request, **arguments)
            if isinstance(response, TemplateResponse):
                response.render()  # what it shows is read meanwhile
        if request.GET.get(DATABASE) and "X-Kjo-Fragment" not in request.headers:
            secure = request.is_secure()
            response.set_cookie(COOKIE, chosen, secure=secure, httponly=True, samesite="Lax")
        return response

    return view


def _chosen_database(request: HttpRequest) -> str | None:
    """Return the database that a page shows; None: there is one only, or the first is shown.

    :raises Http404: none with jobs has the name that is given.
    """
    known, named = databases(), _named_database(request)
    if named is not None and named not in known:
        raise Http404(_("No queue has its jobs in a database of this name."))
    if len(known) == 1:
        return None
    kept = request.COOKIES.get(COOKIE)
    return named or (kept if kept in known else None)


def _named_database(request: HttpRequest) -> str | None:
    """Return the database that a request names: by its form, by its address, or, as a page that
    refreshes itself, by a header. A cookie is no name: another tab may have changed it since."""
    named = request.POST.get(DATABASE) or request.GET.get(DATABASE)
    return named or request.headers.get("X-Kjo-Database") or None


def shared(name: str, compute: Callable[[], Any], seconds: float = CACHE_SECONDS) -> Any:
    """Return a shared value, or compute it. Without the cache it is computed each time.

    :param name: identifies the value and its parameters; hashed, since parameters may come from
        outside.
    """
    key = _key(name)
    try:
        found = cache.get(key)
    except Exception:  # whatever a cache backend raises
        return compute()
    if found is None:
        found = compute()
        with suppress(Exception):  # computed all the same
            cache.set(key, found, seconds)
    return found


def forget(name: str) -> None:
    """Drop a shared value, so that the next page shows the change."""
    with suppress(Exception):  # it is forgotten in seconds anyway
        cache.delete(_key(name))


def _key(name: str) -> str:
    named = f"{jobs_database()}:{name}"
    return f"kjo-dashboard-{hashlib.sha256(named.encode()).hexdigest()[:40]}"
