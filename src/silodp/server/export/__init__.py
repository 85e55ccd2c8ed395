"""Exports of a trained model to forms that need no silodp. A model is public already: nothing here
reads a record.
"""
