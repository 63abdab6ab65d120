from typing import Any

from django.db import migrations, models, router


def compare_exactly(apps: Any, schema_editor: Any) -> None:
    """MariaDB and MySQL: compare names by their characters, as those of the other tables."""
    connection = schema_editor.connection
    model = apps.get_model("kjo_django", "RateWindow")
    if connection.vendor != "mysql" or not router.allow_migrate_model(connection.alias, model):
        return
    collation = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
    table = schema_editor.quote_name(model._meta.db_table)
    schema_editor.execute(f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}")


class Migration(migrations.Migration):
    atomic = False  # MariaDB and MySQL commit each change of a table
    dependencies = [("kjo_django", "0013_text_compared_exactly")]

    operations = [
        migrations.CreateModel(
            name="RateWindow",
            fields=[
                (
                    "name",
                    models.CharField(max_length=255, primary_key=True, serialize=False),
                ),
                ("starts", models.TextField(blank=True, default="")),
                ("expires_at", models.DateTimeField()),
            ],
            options={"db_table": "kjo_rate_window", "default_permissions": ()},
        ),
        migrations.RunPython(compare_exactly, migrations.RunPython.noop),
        *(
            migrations.AddField(
                model_name=model,
                name="unused_permit_count",
                field=models.PositiveBigIntegerField(
                    db_default=0,
                    default=0,
                    help_text="Permits of a rate whose job did not start in time.",
                    verbose_name="permits not used",
                ),
            )
            for model in ("metricbucket", "metricrollup")
        ),
    ]
