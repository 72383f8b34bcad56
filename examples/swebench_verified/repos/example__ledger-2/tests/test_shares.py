import unittest

from ledger.shares import split


class TestSplit(unittest.TestCase):
    def test_even(self):
        self.assertEqual(split(90, 3), [30, 30, 30])
