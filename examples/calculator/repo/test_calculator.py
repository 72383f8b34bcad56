import unittest

from calculator import add, divide, multiply


class Calculator(unittest.TestCase):
    def test_add(self):
        self.assertEqual(5, add(2, 3))

    def test_multiply(self):
        self.assertEqual(6, multiply(2, 3))

    def test_divide(self):
        self.assertEqual(2, divide(6, 3))


if __name__ == "__main__":
    unittest.main()
