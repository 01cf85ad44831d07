"""The cloud: the shared HTTP surface, devices and their enrolment, and the links they open."""
