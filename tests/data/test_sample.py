"""Samples hold media as they are stored; nothing is decoded before encode."""

import pytest

from earlyfusion.data import sample as module
from earlyfusion.data.errors import BadSample
from earlyfusion.data.sample import Image, Region, Regions, Sample, Text, Video, VideoFile


def test_media_stay_as_they_are_until_they_are_encoded(monkeypatch):
    monkeypatch.setattr(module, "open_picture", lambda *_: pytest.fail("decoded"))
    segments = [
        Image(b"no picture"),
        VideoFile(b"no video"),
        Image("/nowhere.png"),
        VideoFile("/nowhere.mp4"),
    ]
    made = Sample([*segments, Text("a"), Regions([Region("x", point=(1, 2))]), Text("b")], "s", "k")
    assert made.text == "ab"


def test_a_video_needs_a_time_for_every_frame():
    for frames, times in (([], []), ([b"x"], []), ([b"x"], [0.0, 1.0])):
        with pytest.raises(BadSample, match="one timestamp"):
            Video(frames, times)
