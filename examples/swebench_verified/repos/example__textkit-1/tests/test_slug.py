import unittest

from textkit.slug import slugify


class TestSlug(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slugify("Two Words"), "two-words")
