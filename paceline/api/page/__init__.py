"""The web page at `/`, and `/docs` and `/dashboard` for people: files as they are, with no build step and nothing of another
host.

endpoint  the routes of the files, and their headers
assets    HTML, CSS and ES modules; `app.js` begins
"""
