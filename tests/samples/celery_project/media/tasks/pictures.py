import celery
from celery import shared_task

from media.models import Picture


@shared_task(rate_limit="30/m")
def make_thumbnail(picture_id, size=128):
    Picture.objects.filter(pk=picture_id).update(width=size)
    return size


@shared_task
def publish_album(album):
    return Picture.objects.filter(album=album, width__gt=0).update(is_public=True)


@shared_task
def make_thumbnails(album, sizes=(64,)):
    pictures = Picture.objects.filter(album=album).values_list("pk", flat=True)
    members = []
    for picture in pictures:
        members.append(make_thumbnail.s(picture, size=sizes[0]))
    celery.chain(celery.group(members), publish_album.si(album)).delay()


@shared_task(queue="slow")
def clean():
    return Picture.objects.filter(width=0).delete()[0]
