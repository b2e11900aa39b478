import pytest
def test_x(internet):
    for net, cmd in [
        (["GET https://api.good.example/**"], ["curl","-sS","-v","--http1.1","https://api.good.example/"]),
        (["GET https://api.good.example/ok/**"], ["curl","-sS","--http1.1","https://api.good.example/no"]),
        (["GET https://h2.good.example/**"], ["curl","-sS","-v","https://h2.good.example/"]),
        (["GET https://h2.good.example/x"], ["curl","-sS","-v","https://h2.good.example/"]),
        (["GET http://api.good.example/x"], ["curl","-sS","-v","http://api.good.example/x"]),
        (["GET http://api.good.example/x"], ["curl","-sS","-v","http://api.good.example/y"]),
    ]:
        r = internet.run(cmd, *[a for n in net for a in ("--net", n)] ) if False else internet.run(cmd, net)
        print(net, cmd[-1], r)
    assert 0
