"""Define feature maps: public functions of one record alone.

They are fixed before any record is read, so they cost no privacy.
"""
