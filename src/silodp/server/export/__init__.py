"""A trained model in forms that need no silodp. A model is public already: nothing here sees a
record.
"""
