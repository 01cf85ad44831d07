"""Sessions that a cloud opens at a device, which read its private documents: who may, how often, and what was read.

- `gate`: admits or refuses an opening, and follows the session to its end
- `limits`: how many are admitted in a minute and in an hour
- `activity`: the log of all of them, for the device's owner
- `answers`: what the owner answered at enrolment, and the permission that follows from it and the settings
"""
