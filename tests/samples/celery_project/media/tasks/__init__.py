from .pictures import make_thumbnail, make_thumbnails, publish_album
from .videos import probe, transcode

__all__ = ["make_thumbnail", "make_thumbnails", "probe", "publish_album", "transcode"]
