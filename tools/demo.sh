#!/bin/sh
# Records data/demo anew: a real run with a slow rank and a dead one, and of its store what is the log or made of it by sealing.
# Two minutes of a machine that does nothing else; the path of this checkout is in the log.
set -e
unskew=${1:-.venv/bin/unskew} store=data/demo
rm -rf "$store"
"$unskew" run --store "$store" --no-dashboard --device sleep --iterations 80 --checkpoint-every 0 \
    --fault slow:rank=3,factor=1.8,at=14 --fault kill:rank=6,at=44
until test -z "$(find "$store/spool" -type f)"; do sleep 1; done
"$unskew" store check --store "$store" # from now on without the collector
"$unskew" diagnose --store "$store"
find "$store" -mindepth 1 -maxdepth 1 ! -name sealed ! -name published ! -name spool ! -name manifest.json -exec rm -r {} +
chmod -R u=rwX,go=rX "$store"
du -sh "$store"
