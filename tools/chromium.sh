#!/bin/sh
# The browser tests need a Chromium and its driver. Installs the distribution's where that is allowed, else says what is missing.
has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
has_driver() { command -v chromedriver; }

has_browser >/dev/null && has_driver >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium and chromium-driver for the browser tests"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } >/dev/null || echo "apt-get could not install them"
fi
has_browser >/dev/null || echo "no chromium, chromium-browser or google-chrome on PATH: the browser tests will be skipped"
has_driver >/dev/null || echo "no chromedriver on PATH: the browser tests will be skipped"
exit 0
