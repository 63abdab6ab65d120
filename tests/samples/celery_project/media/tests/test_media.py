from unittest.mock import MagicMock, patch

from django.test import RequestFactory, TestCase

from media import views
from media.models import Picture, Video
from media.tasks import make_thumbnails, transcode
from media.tasks.videos import CodecError


class MediaTests(TestCase):
    def test_a_video_is_transcoded(self):
        video = Video.objects.create(path="a.mp4")
        with patch("media.tasks.videos.clean.delay"):
            transcode(video.pk)
        video.refresh_from_db()
        self.assertEqual(video.state, "av1:0")

    def test_an_unknown_codec(self):
        video = Video.objects.create(path="a.mp4")
        with self.assertRaises(CodecError):
            transcode(video.pk, codec="vhs")

    @patch("media.views.transcode")
    def test_an_upload(self, transcode):
        views.upload(RequestFactory().post("/", {"path": "a.mp4"}))
        transcode.delay.assert_called_once_with(Video.objects.get().pk, "h264")

    def test_an_album_is_published(self):
        Picture.objects.create(album=7)
        make_thumbnails(7)
        self.assertTrue(Picture.objects.get().is_public)

    def test_thumbnails_are_asked_for(self):
        views.make_thumbnails.delay = MagicMock()
        views.thumbnails(7)
        views.make_thumbnails.delay.assert_called_once_with(7, sizes=[32])
        del views.make_thumbnails.delay
