from celery import shared_task

from media.models import Video


class CodecError(Exception):
    pass


@shared_task
def probe(path):
    return len(path)


@shared_task(
    bind=True,
    queue="slow",
    autoretry_for=(CodecError,),
    retry_backoff=5,
    retry_backoff_max=300,
    retry_jitter=False,
    max_retries=3,
    soft_time_limit=600,
)
def transcode(self, video_id, codec="av1"):
    video = Video.objects.get(pk=video_id)
    if codec not in ("av1", "h264"):
        raise CodecError(codec)
    video.state = f"{codec}:{self.request.retries}"
    video.save()
    clean.delay()
    return self.request.id


@shared_task(queue="slow")
def clean():
    return Video.objects.filter(state="gone").delete()[0]
