/* A program that trusts nobody with names: it asks a DNS server of its own choice, over UDP or TCP, and then fetches
 * a page over plain HTTP. No libc resolver, no /etc/resolv.conf, no proxy variables.
 *
 *     own_resolver SERVER udp|tcp NAME PORT
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    return 1;
}

static int dial(int type, struct in_addr address, int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = address};
    struct timeval patience = {.tv_sec = 5};
    int descriptor = socket(AF_INET, type, 0);

    if (descriptor < 0)
        return -1;
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(descriptor, (struct sockaddr *)&to, sizeof to)) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

static size_t question(unsigned char *message, const char *name)
{
    static const unsigned char head[12] = {0x12, 0x34, 1, 0, 0, 1};
    static const unsigned char tail[5] = {0, 0, 1, 0, 1};
    size_t at = sizeof head;

    memcpy(message, head, sizeof head);
    while (*name) {
        size_t size = strcspn(name, ".");

        message[at++] = size;
        memcpy(message + at, name, size);
        at += size;
        name += size + (name[size] == '.');
    }
    memcpy(message + at, tail, sizeof tail);
    return at + sizeof tail;
}

/* The address in the last record, which is the A record of the answers this is meant for. */
static int answer(const unsigned char *message, ssize_t size, struct in_addr *address)
{
    if (size < 12 + 4 || (message[3] & 15) || message[7] == 0)
        return -1;
    memcpy(address, message + size - 4, 4);
    return 0;
}

int main(int argc, char **argv)
{
    unsigned char message[1024];
    struct in_addr server, address;
    char request[512];
    ssize_t got;
    size_t size;
    int tcp, descriptor;

    if (argc != 5 || !inet_aton(argv[1], &server) || strlen(argv[3]) > 200)
        return 2;
    tcp = !strcmp(argv[2], "tcp");
    size = question(message + 2, argv[3]);
    message[0] = size >> 8;
    message[1] = size;
    descriptor = dial(tcp ? SOCK_STREAM : SOCK_DGRAM, server, 53);
    if (descriptor < 0)
        return failed("the DNS server");
    if (send(descriptor, message + (tcp ? 0 : 2), size + (tcp ? 2 : 0), 0) < 0)
        return failed("the question");
    got = recv(descriptor, message, sizeof message, 0);
    if (tcp && got == 2)
        got += recv(descriptor, message + 2, sizeof message - 2, 0);
    close(descriptor);
    if (got < 0)
        return failed("the answer");
    if (answer(message + (tcp ? 2 : 0), got - (tcp ? 2 : 0), &address)) {
        fprintf(stderr, "%s does not exist\n", argv[3]);
        return 3;
    }
    descriptor = dial(SOCK_STREAM, address, atoi(argv[4]));
    if (descriptor < 0)
        return failed("the web server");
    size = snprintf(request, sizeof request, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", argv[3]);
    if (send(descriptor, request, size, 0) < 0)
        return failed("the request");
    while ((got = recv(descriptor, message, sizeof message, 0)) > 0)
        fwrite(message, 1, got, stdout);
    return got < 0 ? failed("the page") : 0;
}
