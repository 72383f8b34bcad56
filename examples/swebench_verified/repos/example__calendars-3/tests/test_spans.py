import unittest

from calendars.spans import overlap


class TestOverlap(unittest.TestCase):
    def test_apart(self):
        self.assertFalse(overlap((1, 2), (3, 4)))

    def test_inside(self):
        self.assertTrue(overlap((1, 9), (3, 4)))
