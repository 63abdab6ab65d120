from celery import group
from django.http import JsonResponse

from media.models import Video
from media.tasks import make_thumbnail, make_thumbnails, probe, transcode
from media.tasks.pictures import clean as clean_pictures


def upload(request):
    video = Video.objects.create(path=request.POST["path"])
    transcode.delay(video.pk, "h264")
    return JsonResponse({"video": video.pk})


async def upload_later(request):
    await Video.objects.acreate(path="later.mp4")
    handle = probe.delay("later.mp4")
    return JsonResponse({"job": str(handle.id)})


def thumbnails(album):
    make_thumbnails.delay(album, sizes=[32])


def two_sizes(picture):
    group(make_thumbnail.s(picture, 32), make_thumbnail.s(picture, 64)).delay()


def small(picture):
    make_thumbnail.s(picture, size=16).set(queue="slow")
    make_thumbnail.s(picture, 16).apply_async(countdown=5)


def clean():
    clean_pictures.delay()


def seconds(path):
    return probe.delay(path).get(timeout=5)
