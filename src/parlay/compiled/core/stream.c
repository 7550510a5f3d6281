/* The threads that read layers; stream.h says what they promise. All state is under one lock. Threads and forwards wait
 * for one condition, the bell, which is rung on every change. */
#define _GNU_SOURCE
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PIECE (16 << 20) /* bytes that are asked of the disk at once; a stalled disk is noticed between them */
#define LANES 8
#define NOTHING (-1)

/* One buffer. holds: the layer in it. wanted: the one that shall be there next. fault: why that could not be read.
 * used: 1: a forward reads it now. */
typedef struct {
    Stream *stream;
    char *bytes;
    int64_t holds, wanted, fault;
    int used, reading;
    int64_t began; /* when the piece that is being read was asked for */
} Buffer;

struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t bell; /* rung on every change */
    Streaming from;
    StreamedLayer *layer;
    Buffer buffer[2];
    int64_t entered; /* the layer that a forward computes, or NOTHING */
    /* Of the current or last forward: its fault; layers that it
     * entered; which of these failed, counted from 1, 0: none. */
    int64_t fault, count, failed;
    int threads, ending;
};

int64_t parlay_stream_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static uint64_t turned(uint64_t word) { return word << 29 | word >> 35; }

/* Adds words to LANES checksums side by side. Each step can be undone
 * (xor, turn, an odd factor), so no change of a word is lost. */
static void add_to_sums(uint64_t sums[LANES], const char *bytes, int64_t count)
{
    for (int64_t at = 0; at < count; at += LANES * 8) {
        uint64_t words[LANES];
        memcpy(words, bytes + at, sizeof words);
        for (int i = 0; i < LANES; i++) sums[i] = turned(sums[i] ^ words[i]) * 0x9e3779b97f4a7c15u;
    }
}

static uint64_t sum_of(const uint64_t sums[LANES])
{
    uint64_t all = 0;
    for (int i = 0; i < LANES; i++) all = turned(all ^ sums[i]) * 0x9e3779b97f4a7c15u;
    return all;
}

uint64_t parlay_stream_sum(const char *bytes, int64_t count)
{
    uint64_t sums[LANES] = {0};
    add_to_sums(sums, bytes, count);
    return sum_of(sums);
}

/* Tells the system to drop these bytes from its cache. */
static void forget(const Streaming *from, int64_t offset, int64_t bytes)
{
#ifdef POSIX_FADV_DONTNEED
    if (!from->direct) posix_fadvise((int)from->file, offset, bytes, POSIX_FADV_DONTNEED);
#endif
    (void)from, (void)offset, (void)bytes;
}

/* Reads one piece. Returns 0, or why it could not. */
static int64_t read_piece(const Streaming *from, int64_t offset, int64_t bytes, char *to)
{
    for (int64_t done = 0; done < bytes;) {
        ssize_t count = pread((int)from->file, to + done, (size_t)(bytes - done), offset + done);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0 || (from->direct && count % STREAM_BLOCK)) return STREAM_ENDED;
        done += count;
    }
    forget(from, offset, bytes);
    return 0;
}

/* Reads a layer piece by piece and compares its checksum. `began`,
 * if not null, tells others when the current piece was asked for. */
static int64_t read_layer(const Streaming *from, const StreamedLayer *layer, char *to, int64_t *began)
{
    uint64_t sums[LANES] = {0};
    for (int64_t at = 0; at < layer->bytes; at += PIECE) {
        int64_t bytes = layer->bytes - at < PIECE ? layer->bytes - at : PIECE;
        if (began) __atomic_store_n(began, parlay_stream_now(), __ATOMIC_SEQ_CST);
        int64_t fault = read_piece(from, layer->offset + at, bytes, to + at);
        if (fault) return fault;
        add_to_sums(sums, to + at, bytes);
    }
    return sum_of(sums) == layer->sum ? 0 : STREAM_DAMAGED;
}

int64_t parlay_stream_watched(const Streaming *from, int64_t number, char *to, int64_t *began)
{
    return read_layer(from, &from->layer[number], to, began);
}

int64_t parlay_stream_read(const Streaming *from, int64_t number, char *to)
{
    return parlay_stream_watched(from, number, to, 0);
}

/* ------------------------------------------------------------------------------------------------------ the readers */

static int has_to_read(const Buffer *buffer)
{
    return !buffer->used && buffer->wanted != NOTHING && buffer->wanted != buffer->holds;
}

/* Reads the wanted layer into the buffer. The lock is released meanwhile. A layer that could not be read is not tried
 * again until a forward asks for it. */
static void fill(Stream *stream, Buffer *buffer)
{
    int64_t number = buffer->wanted;
    buffer->holds = NOTHING, buffer->reading = 1;
    __atomic_store_n(&buffer->began, parlay_stream_now(), __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&stream->lock);
    int64_t fault = read_layer(&stream->from, &stream->layer[number], buffer->bytes, &buffer->began);
    pthread_mutex_lock(&stream->lock);
    buffer->reading = 0;
    if (!fault)
        buffer->holds = number;
    else if (buffer->wanted == number)
        buffer->fault = fault, buffer->wanted = NOTHING;
    pthread_cond_broadcast(&stream->bell);
}

/* The thread of a buffer. */
static void *serve(void *own)
{
    Buffer *buffer = own;
    Stream *stream = buffer->stream;
    pthread_mutex_lock(&stream->lock);
    while (!stream->ending)
        if (has_to_read(buffer))
            fill(stream, buffer);
        else
            pthread_cond_wait(&stream->bell, &stream->lock);
    stream->threads--;
    pthread_cond_broadcast(&stream->bell);
    pthread_mutex_unlock(&stream->lock);
    return 0;
}

int parlay_stream_thread(void *(*serves)(void *), void *own)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attributes, serves, own);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return !failed;
}

int parlay_stream_wait(pthread_cond_t *bell, pthread_mutex_t *lock, int64_t end)
{
    int64_t left = end - parlay_stream_now();
    if (left <= 0) return 0;
    struct timespec until; /* conditions know this clock on all systems */
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t at = until.tv_nsec + left;
    until.tv_sec += at / 1000000000, until.tv_nsec = at % 1000000000;
    pthread_cond_timedwait(bell, lock, &until);
    return 1;
}

Stream *parlay_stream_open(const Streaming *from)
{
    Stream *stream = calloc(1, sizeof *stream);
    StreamedLayer *layer = malloc((size_t)from->count * sizeof *layer);
    if (!stream || !layer) return free(stream), free(layer), (Stream *)0;
    memcpy(layer, from->layer, (size_t)from->count * sizeof *layer);
    stream->from = *from, stream->layer = layer, stream->from.layer = layer, stream->entered = NOTHING;
    pthread_mutex_init(&stream->lock, 0);
    pthread_cond_init(&stream->bell, 0);
    pthread_mutex_lock(&stream->lock);
    for (int64_t i = 0; i < 2; i++) {
        stream->buffer[i] = (Buffer){stream, from->buffer[i], .holds = NOTHING, .wanted = i < from->count ? i : NOTHING};
        stream->threads += parlay_stream_thread(serve, &stream->buffer[i]);
    }
    int started = stream->threads;
    pthread_mutex_unlock(&stream->lock);
    if (started == 2) return stream;
    parlay_stream_close(stream);
    return 0;
}

int64_t parlay_stream_close(Stream *stream)
{
    int64_t end = parlay_stream_now() + stream->from.patience;
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->bell);
    while (stream->threads && parlay_stream_wait(&stream->bell, &stream->lock, end)) {}
    int ended = !stream->threads;
    pthread_mutex_unlock(&stream->lock);
    if (!ended) return 0; /* a thread that is still reading uses this memory */
    pthread_cond_destroy(&stream->bell);
    pthread_mutex_destroy(&stream->lock);
    free(stream->layer);
    free(stream);
    return 1;
}

/* ----------------------------------------------------------------------------------------------------- the forwards */

void parlay_stream_begin(Stream *stream)
{
    __atomic_store_n(&stream->failed, 0, __ATOMIC_SEQ_CST);
    stream->fault = stream->count = 0;
}

int parlay_stream_ends(const Stream *stream, int64_t entered)
{
    int64_t failed = __atomic_load_n(&stream->failed, __ATOMIC_SEQ_CST);
    return failed && failed <= entered;
}

int64_t parlay_stream_fault(const Stream *stream) { return stream->fault; }

/* The next layer of the same buffer; after the last one it is the first of the next forward. */
static int64_t following(const Stream *stream, int64_t number)
{
    return number + 2 < stream->from.count ? number + 2 : number % 2;
}

/* Gives the entered layer's buffer free for the next layer. */
static void leave(Stream *stream)
{
    Buffer *left = &stream->buffer[stream->entered % 2];
    left->used = 0, left->wanted = following(stream, stream->entered);
    stream->entered = NOTHING;
    pthread_cond_broadcast(&stream->bell);
}

/* Waits until a layer is in its buffer, as long as each piece comes within the patience. Returns 0, or why it cannot be
 * had. A disk that has stalled already is not waited for again. */
static int64_t wait_for(Stream *stream, Buffer *buffer, int64_t number)
{
    int64_t asked = parlay_stream_now();
    while (buffer->holds != number) {
        if (buffer->fault && buffer->wanted == NOTHING) return buffer->fault;
        int64_t began = buffer->reading ? __atomic_load_n(&buffer->began, __ATOMIC_SEQ_CST) : asked;
        if (!parlay_stream_wait(&stream->bell, &stream->lock, began + stream->from.patience)) return STREAM_STALLED;
    }
    return 0;
}

void parlay_stream_enter(Stream *stream, int64_t number)
{
    pthread_mutex_lock(&stream->lock);
    stream->count++;
    if (stream->entered != NOTHING && stream->entered != number) leave(stream);
    if (number != NOTHING && stream->entered != number) {
        Buffer *buffer = &stream->buffer[number % 2];
        buffer->wanted = number, buffer->fault = 0;
        pthread_cond_broadcast(&stream->bell);
        int64_t fault = wait_for(stream, buffer, number);
        if (!fault)
            buffer->used = 1, stream->entered = number;
        else
            stream->fault = fault, __atomic_store_n(&stream->failed, stream->count, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&stream->lock);
}
