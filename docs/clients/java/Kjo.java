import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.UUID;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.Headers;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Jobs, events and KDLQ messages of kjo_django, as kafka-clients sends and receives them.
 *
 * <p>The rules are those of docs/reference/protocol.md; Vectors.java checks them.
 */
public final class Kjo {
    private static final ObjectMapper JSON =
            new ObjectMapper().enable(DeserializationFeature.FAIL_ON_TRAILING_TOKENS);

    private Kjo() {}

    /** A record that no retry can make readable. */
    public static final class Refused extends Exception {
        private static final long serialVersionUID = 1;

        /** The reason of its dead letter. */
        public final String reason;

        Refused(String reason, String message) {
            super(message);
            this.reason = reason;
        }
    }

    /** Settings of a producer that has written when it says so, and of a consumer from the start. */
    public static Properties settings(String group) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", System.getenv("KAFKA_BOOTSTRAP_SERVERS"));
        settings.put("key.serializer", ByteArraySerializer.class);
        settings.put("value.serializer", ByteArraySerializer.class);
        settings.put("key.deserializer", ByteArrayDeserializer.class);
        settings.put("value.deserializer", ByteArrayDeserializer.class);
        settings.put("group.id", group);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        return settings;
    }

    // --- Jobs ------------------------------------------------------------------------------------

    /** A job's message as it is read. */
    public record Job(
            String id,
            String type,
            String jobId,
            String service,
            long generation,
            long attempt,
            long replayCount,
            String contentType,
            JsonNode arguments) {}

    /**
     * The message of a job for a worker.
     *
     * @param id identifies its effects: whoever sends it again, sends the same id, and it runs once
     */
    public static ProducerRecord<byte[], byte[]> job(
            String topic, String key, String id, String type, Object arguments) {
        var record = record(topic, key, JSON.valueToTree(arguments));
        put(record.headers(), "kjo-id", id);
        put(record.headers(), "kjo-type", type);
        return record;
    }

    /** Read a job's message, its dead letter or its replay. */
    public static Job readJob(ConsumerRecord<byte[], byte[]> record) throws Refused {
        Headers headers = record.headers();
        if (record.value() == null || record.value().length == 0) {
            throw new Refused("invalid", "The message has no value");
        }
        String jobId = text(headers, "kjo-job-id", "");
        if (length(jobId) > 200 || jobId.contains("\0")) {
            throw new Refused("invalid", "The kjo-job-id header is not a usable identifier");
        }
        String id = identifier(headers, "kjo-id", 200);
        String type = identifier(headers, "kjo-type", 100);
        String contentType = text(headers, "content-type", "application/json");
        if (!contentType.split(";")[0].strip().equalsIgnoreCase("application/json")) {
            throw new Refused("deserialization", contentType + " is not read here");
        }
        return new Job(
                id,
                type,
                jobId.isEmpty() ? null : jobId,
                text(headers, "kjo-service", ""),
                number(headers, "kjo-generation", 1),
                number(headers, "kjo-attempt", 1),
                number(headers, "kjo-replay-count", 0),
                contentType,
                parsed(record.value()));
    }

    // --- Events ----------------------------------------------------------------------------------

    /** The message of an event, which has got an id and a timestamp where it has none. */
    public static ProducerRecord<byte[], byte[]> event(String topic, Map<String, ?> given)
            throws Refused {
        ObjectNode made = JSON.createObjectNode();
        made.put("id", UUID.randomUUID().toString());
        made.put("timestamp", System.currentTimeMillis());
        made.putObject("data");
        made.setAll((ObjectNode) JSON.valueToTree(given));
        for (String name : List.of("subject", "dataschema")) {
            if (made.hasNonNull(name)) {
                filled(name, made.get(name), 1000);
            }
        }
        ObjectNode event = checked(made);
        var record = record(topic, key(event), event);
        put(record.headers(), "content-type", "application/json");
        for (String name : List.of("id", "type", "source", "version")) {
            put(record.headers(), "event-" + name, event.get(name).textValue());
        }
        JsonNode correlation = event.path("metadata").path("correlationId");
        if (correlation.isTextual()) {
            put(record.headers(), "correlation-id", correlation.textValue());
        }
        return record;
    }

    /**
     * Read an event; empty for one of a type that is not handled, valid or not.
     *
     * @param handled the versions that are understood of each type
     */
    public static Optional<ObjectNode> readEvent(
            ConsumerRecord<byte[], byte[]> record, Map<String, List<String>> handled)
            throws Refused {
        if (record.value() == null) {
            throw new Refused("invalid", "The event has no value");
        }
        if (!(parsed(record.value()) instanceof ObjectNode given)) {
            throw new Refused("invalid", "An event must be an object");
        }
        String type = given.path("type").textValue();
        if (type != null && !type.isEmpty() && !handled.containsKey(type)) {
            return Optional.empty();
        }
        ObjectNode event = checked(given);
        String version = event.get("version").textValue();
        if (!handled.get(type).contains(version)) {
            throw new Refused("invalid", "Version " + version + " is not understood here");
        }
        return Optional.of(event);
    }

    /** The key of an event's record: its user, else its id. */
    public static String key(ObjectNode event) {
        JsonNode data = event.get("data");
        String user = event.path("metadata").path("userId").textValue();
        if (user == null) {
            user = asText(either(data, "userId", "user_id")).textValue();
        }
        return user == null || user.isEmpty() ? event.get("id").textValue() : user;
    }

    private static ObjectNode checked(ObjectNode given) throws Refused {
        ObjectNode event = JSON.createObjectNode();
        event.put("id", filled("id", given.path("id"), 255));
        event.put("type", filled("type", given.path("type"), 100));
        event.put("source", filled("source", given.path("source"), 100));
        JsonNode timestamp = given.path("timestamp");
        boolean isWhole = timestamp.canConvertToExactIntegral() && timestamp.canConvertToLong();
        if (!isWhole || timestamp.asLong() <= 0 || timestamp.asLong() > 253402300799999L) {
            throw new Refused("invalid", "timestamp must be milliseconds of Unix time");
        }
        event.put("timestamp", timestamp.asLong());
        event.put("version", given.hasNonNull("version") ? version(given.get("version")) : "1");
        if (!given.path("data").isObject()) {
            throw new Refused("invalid", "data must be an object");
        }
        event.set("data", given.get("data"));
        for (String name : List.of("subject", "dataschema")) {
            if (isFilled(given.path(name), 1000)) { // readers of version 1.0 ignored these
                event.set(name, given.get(name));
            }
        }
        if (given.hasNonNull("metadata")) {
            event.set("metadata", metadata(given.get("metadata")));
        }
        return event;
    }

    /** A version as it is compared: 1, "1", "v1" and "1.0" are equal. */
    private static String version(JsonNode given) throws Refused {
        JsonNode text = given;
        if (given.isNumber()) {
            text = texted(given.decimalValue().stripTrailingZeros().toPlainString());
        }
        String version = filled("version", text, 50).strip();
        if (!version.matches("[vV]?\\d+(\\.\\d+)*")) {
            return version;
        }
        return version.replaceAll("^[vV]|(\\.0+)+$", "");
    }

    private static ObjectNode metadata(JsonNode given) throws Refused {
        if (!given.isObject()) {
            throw new Refused("invalid", "metadata must be an object");
        }
        ObjectNode found = given.deepCopy();
        var spellings =
                Map.of(
                        "correlationId", "correlation_id",
                        "causationId", "causation_id",
                        "userId", "user_id");
        for (var spelling : spellings.entrySet()) {
            String name = spelling.getKey();
            JsonNode value = asText(either(given, name, spelling.getValue()));
            found.remove(List.of(name, spelling.getValue()));
            if (!value.isMissingNode() && !value.isNull()) {
                found.put(name, filled("metadata." + name, value, 255));
            }
        }
        return found;
    }

    // --- KDLQ ------------------------------------------------------------------------------------

    public enum Answer {
        OK,
        MUST_BE_REDELIVERED,
        ERROR
    }

    public enum Status {
        OK,
        REDELIVERED,
        ROUTED_TO_DLQ,
        SKIPPED_DLQ_MAX_ATTEMPTS_REACHED
    }

    /** What became of a record: the record to send before the offset is committed, or null. */
    public record Decision(Status status, ProducerRecord<byte[], byte[]> record) {}

    /** Told of in a dead letter. */
    public record Failure(String errorClass, String message) {}

    /**
     * How records are routed.
     *
     * @param redeliveryTopic null for the topic of the record
     * @param maxRedeliveries -1 for no limit, and so {@code maxKills}
     */
    public record Config(
            String consumer,
            String redeliveryTopic,
            String dlqTopic,
            int maxRedeliveries,
            int maxKills,
            boolean informationalHeaders) {}

    /** Processes a record; what it throws kills the record. */
    public interface Processor {
        Answer process(ConsumerRecord<byte[], byte[]> record) throws Exception;
    }

    /** Process a record and decide what becomes of it. */
    public static Decision accept(
            ConsumerRecord<byte[], byte[]> record, Processor processor, Config config) {
        Answer answer = Answer.ERROR;
        Failure failure = null;
        try {
            answer = processor.process(record);
        } catch (Exception error) {
            failure = new Failure(error.getClass().getName(), String.valueOf(error.getMessage()));
        }
        return decide(record, answer, config, failure, System.currentTimeMillis());
    }

    /** Decide what becomes of a record that was answered like this. */
    public static Decision decide(
            ConsumerRecord<byte[], byte[]> record,
            Answer answer,
            Config config,
            Failure failure,
            long now) {
        int redelivered = counter(record.headers(), "KDLQ_Redelivered");
        int kills = counter(record.headers(), "KDLQ_Kills");
        if (answer == Answer.OK) {
            return new Decision(Status.OK, null);
        }
        Headers headers = kept(record, config);
        boolean isAllowed = config.maxRedeliveries < 0 || redelivered < config.maxRedeliveries;
        if (answer == Answer.MUST_BE_REDELIVERED && isAllowed) {
            replace(headers, "KDLQ_Redelivered", counted(redelivered));
            String topic = config.redeliveryTopic;
            return new Decision(
                    Status.REDELIVERED, copy(record, topic == null ? record.topic() : topic, headers));
        }
        if (0 <= config.maxKills && config.maxKills <= kills) {
            return new Decision(Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED, null);
        }
        replace(headers, "KDLQ_Kills", counted(kills));
        replace(headers, "KDLQ_FailedAt", bytes(now));
        headers.remove("KDLQ_ErrorClass").remove("KDLQ_ErrorMessage");
        if (failure != null) {
            String message = failure.message;
            int most = message.offsetByCodePoints(0, Math.min(500, length(message)));
            put(headers, "KDLQ_ErrorClass", failure.errorClass);
            put(headers, "KDLQ_ErrorMessage", message.substring(0, most));
        }
        return new Decision(Status.ROUTED_TO_DLQ, copy(record, config.dlqTopic, headers));
    }

    /** A counter of KDLQ; what is no number of four bytes, or negative, counts as 0. */
    public static int counter(Headers headers, String name) {
        byte[] value = header(headers, name);
        return value == null || value.length != 4 ? 0 : Math.max(0, ByteBuffer.wrap(value).getInt());
    }

    /** The record's headers, with what tells of the origin where that is not there yet. */
    private static Headers kept(ConsumerRecord<byte[], byte[]> record, Config config) {
        Headers headers = new RecordHeaders(record.headers());
        keepFirst(headers, "KDLQ_OrigTopic", record.topic().getBytes(StandardCharsets.UTF_8));
        if (config.informationalHeaders) {
            keepFirst(headers, "KDLQ_OrigOffset", bytes(record.offset()));
            keepFirst(headers, "KDLQ_OrigPartition", bytes(record.partition()));
            keepFirst(headers, "KDLQ_OrigTs", bytes(record.timestamp()));
        }
        replace(headers, "KDLQ_PrcMarker", config.consumer.getBytes(StandardCharsets.UTF_8));
        return headers;
    }

    private static void keepFirst(Headers headers, String name, byte[] value) {
        if (headers.lastHeader(name) == null) {
            headers.add(name, value);
        }
    }

    private static void replace(Headers headers, String name, byte[] value) {
        headers.remove(name).add(name, value);
    }

    private static ProducerRecord<byte[], byte[]> copy(
            ConsumerRecord<byte[], byte[]> record, String topic, Headers headers) {
        return new ProducerRecord<>(topic, null, record.key(), record.value(), headers);
    }

    private static byte[] counted(int count) {
        return bytes(count == Integer.MAX_VALUE ? count : count + 1);
    }

    private static byte[] bytes(int value) {
        return ByteBuffer.allocate(4).putInt(value).array();
    }

    private static byte[] bytes(long value) {
        return ByteBuffer.allocate(8).putLong(value).array();
    }

    // --- Headers and JSON ------------------------------------------------------------------------

    private static ProducerRecord<byte[], byte[]> record(String topic, String key, JsonNode value) {
        byte[] keyed = key == null ? null : key.getBytes(StandardCharsets.UTF_8);
        byte[] body = value.toString().getBytes(StandardCharsets.UTF_8);
        return new ProducerRecord<>(topic, keyed, body);
    }

    private static void put(Headers headers, String name, String value) {
        replace(headers, name, value.getBytes(StandardCharsets.UTF_8));
    }

    /** The value of a header, or null. Of a name given more than once the last counts. */
    private static byte[] header(Headers headers, String name) {
        Header found = headers.lastHeader(name);
        return found == null ? null : found.value();
    }

    private static String text(Headers headers, String name, String otherwise) {
        byte[] value = header(headers, name);
        return value == null ? otherwise : new String(value, StandardCharsets.UTF_8);
    }

    private static long number(Headers headers, String name, long otherwise) {
        String found = text(headers, name, "");
        if (!found.matches("[0-9]{1,18}") || Long.parseLong(found) > Integer.MAX_VALUE) {
            return otherwise;
        }
        return Long.parseLong(found);
    }

    private static String identifier(Headers headers, String name, int limit) throws Refused {
        byte[] value = header(headers, name);
        if (value == null || value.length == 0) {
            throw new Refused("invalid", "The message has no " + name + " header");
        }
        String found = decoded(value, "invalid");
        if (length(found) > limit || found.contains("\0")) {
            throw new Refused("invalid", "The " + name + " header is not a usable identifier");
        }
        return found;
    }

    private static boolean isFilled(JsonNode value, int limit) {
        String text = value.textValue();
        return text != null
                && !text.isBlank()
                && !text.contains("\0")
                && length(text) <= limit;
    }

    private static String filled(String name, JsonNode value, int limit) throws Refused {
        if (!isFilled(value, limit)) {
            throw new Refused("invalid", name + " must be text of 1 to " + limit + " characters");
        }
        return value.textValue();
    }

    private static int length(String text) {
        return text.codePointCount(0, text.length()); // characters, not units of UTF-16
    }

    private static JsonNode either(JsonNode given, String camel, String snake) {
        return given.hasNonNull(camel) ? given.get(camel) : given.path(snake);
    }

    private static JsonNode asText(JsonNode value) {
        return value.isIntegralNumber() ? texted(value.asText()) : value;
    }

    private static JsonNode texted(String text) {
        return JsonNodeFactory.instance.textNode(text);
    }

    private static String decoded(byte[] value, String reason) throws Refused {
        try {
            return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(value)).toString();
        } catch (CharacterCodingException error) {
            throw new Refused(reason, "Not valid UTF-8");
        }
    }

    private static JsonNode parsed(byte[] value) throws Refused {
        try {
            JsonNode found = JSON.readTree(decoded(value, "deserialization"));
            if (found.isMissingNode()) {
                throw new Refused("deserialization", "White space is no JSON");
            }
            return found;
        } catch (JsonProcessingException error) {
            throw new Refused("deserialization", error.getOriginalMessage());
        }
    }
}
