"""``path("kjo/", include("kjo_django.api.urls"))``."""

from __future__ import annotations

from django.db import transaction
from django.urls import path

from kjo_django.api import bulk, dead_letters, job_actions, jobs, metrics, queues, system, workers

app_name = "kjo_django_api"
urlpatterns = [
    path("jobs/", jobs.JobsView.as_view(), name="jobs"),
    path("jobs/<str:id>/", jobs.JobView.as_view(), name="job"),
    path("jobs/<str:id>/cancel/", job_actions.CancelView.as_view(), name="job-cancel"),
    path("jobs/<str:id>/requeue/", job_actions.RequeueView.as_view(), name="job-requeue"),
    path("jobs/<str:id>/run-now/", job_actions.RunNowView.as_view(), name="job-run-now"),
    path(
        "jobs/<str:id>/change-queue/",
        job_actions.ChangeQueueView.as_view(),
        name="job-change-queue",
    ),
    # A transaction of the request would hide the job's end, and be open all the while.
    path(
        "jobs/<str:id>/wait/",
        transaction.non_atomic_requests(jobs.WaitView.as_view()),
        name="job-wait",
    ),
    path("dead-letters/", dead_letters.DeadLettersView.as_view(), name="dead-letters"),
    path("dead-letters/groups/", dead_letters.GroupsView.as_view(), name="dead-letter-groups"),
    path("dead-letters/replay/", bulk.ReplayView.as_view(), name="dead-letters-replay"),
    path("dead-letters/discard/", bulk.DiscardView.as_view(), name="dead-letters-discard"),
    path("dead-letters/<str:id>/", dead_letters.DeadLetterView.as_view(), name="dead-letter"),
    path(
        "dead-letters/<str:id>/replay/",
        dead_letters.ReplayView.as_view(),
        name="dead-letter-replay",
    ),
    path(
        "dead-letters/<str:id>/edit-and-replay/",
        dead_letters.EditView.as_view(),
        name="dead-letter-edit-and-replay",
    ),
    path(
        "dead-letters/<str:id>/discard/",
        dead_letters.DiscardView.as_view(),
        name="dead-letter-discard",
    ),
    path("queues/", queues.QueuesView.as_view(), name="queues"),
    path("queues/<str:queue>/", queues.QueueView.as_view(), name="queue"),
    path("queues/<str:queue>/pause/", queues.PauseView.as_view(), name="queue-pause"),
    path("queues/<str:queue>/resume/", queues.ResumeView.as_view(), name="queue-resume"),
    path("workers/", workers.WorkersView.as_view(), name="workers"),
    path("workers/<str:id>/", workers.WorkerView.as_view(), name="worker"),
    path("workers/<str:id>/quiet/", workers.QuietView.as_view(), name="worker-quiet"),
    path("workers/<str:id>/unquiet/", workers.UnquietView.as_view(), name="worker-unquiet"),
    path("workers/<str:id>/stop/", workers.StopView.as_view(), name="worker-stop"),
    path("processed-events/", system.ProcessedEventsView.as_view(), name="processed-events"),
    path("metrics/", metrics.MetricsView.as_view(), name="metrics"),
    path("metrics/queues/", metrics.QueuesView.as_view(), name="metrics-queues"),
    path("metrics/handlers/", metrics.HandlersView.as_view(), name="metrics-handlers"),
    path("health/", system.HealthView.as_view(), name="health"),
]
