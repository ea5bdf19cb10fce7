#!/bin/sh
# mypy over unskew.*: the packages lie at the top but import as unskew.<package> (pyproject.toml, package-dir), which mypy cannot
# be told, so it reads a tree of links in which they lie where they import from. Usage: tools/typecheck.sh MYPY [mypy options]
set -e
cd "$(dirname "$0")/.."
mypy=$1
shift
tree=build/typing
rm -rf $tree
mkdir -p $tree/unskew
for entry in unskew/*; do ln -s "../../../$entry" $tree/unskew/; done
for package in collector analytics runtime dashboard benchmarks; do ln -s ../../../$package $tree/unskew/; done
MYPYPATH=$tree exec "$mypy" --explicit-package-bases -p unskew "$@"
