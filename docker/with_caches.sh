#!/bin/sh
# Runs a command with the files of one cache in the caches of this user, as links: they take no room in
# a volume, and what is compiled or downloaded later is written beside them.
#
#   with_caches FOLDER COMMAND ...
#
# Links to files that a newer image has no more are removed. A volume that cannot be written to ends
# nothing here.
from=$1
shift
for cache in "$HOME/.cache" "$XDG_CACHE_HOME"; do
    mkdir -p "$cache" && find "$cache" -lname "$from/*" -xtype l -delete
    cp -rsn "$from/." "$cache/"
done 2>/dev/null
exec "$@"
