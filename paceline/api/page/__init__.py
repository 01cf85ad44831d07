"""The web page at `/`, with `/docs` and `/dashboard` for people: files as they are, without build step or other host.

endpoint  the routes of the files, and their headers
assets    HTML, CSS and ES modules; `app.js` begins. In `vendor`: libraries of others, loaded when needed
"""
