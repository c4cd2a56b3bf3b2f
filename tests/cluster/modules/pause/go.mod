module kvloop.io/tests/cluster/pause

go 1.26
