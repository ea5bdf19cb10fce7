#!/bin/sh
# mypy over unskew.*: the packages lie at the top but import as unskew.<package> (pyproject.toml, package-dir), which mypy cannot
# be told, so it reads a tree of links in which they lie where they import from. Usage: tools/typecheck.sh MYPY [mypy options]
set -e
cd "$(dirname "$0")/.."
mypy=$1
shift
tree=build/typing
mkdir -p $tree/unskew
find $tree/unskew -xtype l -delete  # what has gone; the rest stays, so that two calls at once do not disturb each other
for entry in unskew/*; do ln -sfn "../../../$entry" "$tree/$entry"; done
for package in collector analytics runtime dashboard benchmarks; do ln -sfn ../../../$package $tree/unskew/$package; done
MYPYPATH=$tree exec "$mypy" --explicit-package-bases -p unskew "$@"
